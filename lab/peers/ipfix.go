// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"errors"
	"net/netip"
)

// Information elements that the lab counts by (IANA registry).
const (
	packetDeltaCount = 2
	ingressInterface = 10
)

// templateKey names a template: its number is the exporter's own, in each observation domain.
type templateKey struct {
	exporter netip.Addr
	domain   uint32
	id       uint16
}

// element is a field of a template; an enterprise's own has number 0 here.
type element struct{ id, size uint16 }

var errTruncated = errors.New("truncated")

// message counts the data records of one IPFIX message (RFC 7011 section 3) whose templates are known.
func (s *sink) message(exporter netip.Addr, b []byte) error {
	if len(b) < 16 || be.Uint16(b) != 10 || int(be.Uint16(b[2:])) != len(b) {
		return errors.New("no IPFIX message")
	}
	domain := be.Uint32(b[12:])
	s.mu.Lock()
	defer s.mu.Unlock()
	for b = b[16:]; len(b) > 0; {
		if len(b) < 4 {
			return errTruncated
		}
		id, size := be.Uint16(b), int(be.Uint16(b[2:]))
		if size < 4 || size > len(b) {
			return errTruncated
		}
		set := b[4:size]
		b = b[size:]
		if id == 2 {
			if err := s.learn(exporter, domain, set); err != nil {
				return err
			}
		} else if fields := s.templates[templateKey{exporter, domain, id}]; fields != nil {
			s.count(exporter, fields, set)
		}
	}
	return nil
}

// learn enters the templates of a template set (RFC 7011 section 3.4.1).
func (s *sink) learn(exporter netip.Addr, domain uint32, set []byte) error {
	for len(set) >= 4 {
		id, n := be.Uint16(set), int(be.Uint16(set[2:]))
		set = set[4:]
		fields := make([]element, 0, n)
		for range n {
			if len(set) < 4 {
				return errTruncated
			}
			e := element{be.Uint16(set), be.Uint16(set[2:])}
			set = set[4:]
			if e.id&0x8000 != 0 { // an enterprise number follows
				if len(set) < 4 {
					return errTruncated
				}
				e.id, set = 0, set[4:]
			}
			if e.size == 0xffff {
				return errors.New("fields of variable length are not supported by the built-in sink")
			}
			fields = append(fields, e)
		}
		s.templates[templateKey{exporter, domain, id}] = fields
	}
	return nil
}

// count enters the records of a data set.
func (s *sink) count(exporter netip.Addr, fields []element, set []byte) {
	size := 0
	for _, f := range fields {
		size += int(f.size)
	}
	for ; size > 0 && len(set) >= size; set = set[size:] {
		key, packets := flowLine{Peer: exporter.String()}, 0
		rest := set
		for _, f := range fields {
			switch f.id {
			case packetDeltaCount:
				packets = int(number(rest[:f.size]))
			case ingressInterface:
				key.In = uint32(number(rest[:f.size]))
			}
			rest = rest[f.size:]
		}
		s.flowsSeen[key] += packets
	}
}

// number reads an unsigned integer of any length up to 8 bytes (RFC 7011 section 6.2).
func number(b []byte) uint64 {
	var n uint64
	for _, c := range b {
		n = n<<8 | uint64(c)
	}
	return n
}
