// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/internal/ipfix"
)

// Information elements used for counting (IANA registry).
const (
	packetDeltaCount = 2
	ingressInterface = 10
)

// templateKey identifies a template. Its number is local to the exporter and the observation domain.
type templateKey struct {
	exporter netip.Addr
	domain   uint32
	id       uint16
}

// message counts the data records with known templates of one IPFIX message (RFC 7011 section 3).
func (s *sink) message(exporter netip.Addr, b []byte) error {
	m, err := ipfix.Parse(b)
	if err != nil {
		return err
	}
	if m.Version != ipfix.IPFIX {
		return errors.New("not an IPFIX message")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range m.Changes {
		if c.Template == nil {
			continue
		}
		fields := c.Template.Fields(m.Version)
		if slices.ContainsFunc(fields, func(f ipfix.Field) bool { return f.Length == 0xffff }) {
			return errors.New("fields of variable length are not supported by the built-in sink")
		}
		s.templates[templateKey{exporter, m.Domain, c.Template.ID}] = fields
	}
	for _, set := range m.Sets {
		if fields := s.templates[templateKey{exporter, m.Domain, set.ID}]; fields != nil {
			s.count(exporter, fields, set.Body())
		}
	}
	return nil
}

// count counts the records of a data set.
func (s *sink) count(exporter netip.Addr, fields []ipfix.Field, set []byte) {
	size := 0
	for _, f := range fields {
		size += int(f.Length)
	}
	for ; size > 0 && len(set) >= size; set = set[size:] {
		key, packets := flowLine{Peer: exporter.String()}, 0
		rest := set
		for _, f := range fields {
			switch f.ID {
			case packetDeltaCount:
				packets = int(number(rest[:f.Length]))
			case ingressInterface:
				key.In = uint32(number(rest[:f.Length]))
			}
			rest = rest[f.Length:]
		}
		s.flowsSeen[key] += packets
	}
}

// number reads an unsigned big-endian integer of up to 8 bytes (RFC 7011 section 6.2).
func number(b []byte) uint64 {
	var n uint64
	for _, c := range b {
		n = n<<8 | uint64(c)
	}
	return n
}
