// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/feature/filter/pcap"
)

// Header lengths in bytes before the IP packet. "Cooked" captures (tcpdump -i any) and captures of
// loopback devices of other systems have them: https://www.tcpdump.org/linktypes.html.
const (
	sllHeader   = 16
	sll2Header  = 20
	nullHeader  = 4
	linkOldRaw  = layers.LinkType(12) // DLT_RAW, in old files
	pcapngMagic = 0x0a0d0d0a
)

// ErrCutShort reports a capture with an incomplete last packet: the capture was not closed, or is
// damaged there. All packets before it have been tried.
var ErrCutShort = errors.New("the capture is cut short")

// Capture tries every packet of a capture. The format is pcap or pcapng, optionally compressed by
// gzip. After [ErrCutShort], Result includes the packets before the damage.
func (t *Trial) Capture(r io.Reader) error { return ReadCapture(r, t) }

// ReadCapture tries every packet of a capture on several filters.
func ReadCapture(r io.Reader, on ...*Trial) error {
	b, err := unzip(bufio.NewReaderSize(r, 1<<16))
	if err != nil {
		return err
	}
	magic, err := b.Peek(4)
	if errors.Is(err, io.EOF) && len(magic) == 0 {
		return errors.New("read capture: the file is empty")
	} else if err != nil {
		return fmt.Errorf("read capture: %w", err)
	}
	if binary.BigEndian.Uint32(magic) != pcapngMagic {
		p, err := pcap.New(b)
		if err != nil {
			return fmt.Errorf("read capture: want pcap or pcapng, as written by tcpdump -w or Wireshark: %w", err)
		}
		return tryEach(on, p.Next)
	}
	p, err := pcap.NewNG(b)
	if err != nil {
		return fmt.Errorf("pcapng: %w", err)
	}
	return tryEach(on, p.Next)
}

// unzip decompresses gzip data and returns other data unchanged.
func unzip(b *bufio.Reader) (*bufio.Reader, error) {
	if magic, err := b.Peek(2); err != nil || magic[0] != 0x1f || magic[1] != 0x8b {
		return b, nil
	}
	z, err := gzip.NewReader(b)
	if err != nil {
		return nil, fmt.Errorf("gzip: %w", err)
	}
	return bufio.NewReaderSize(z, 1<<16), nil
}

func tryEach(on []*Trial, next func() (pcap.Record, error)) error {
	for n := 1; ; n++ {
		rec, err := next()
		switch {
		case errors.Is(err, io.ErrUnexpectedEOF):
			return fmt.Errorf("%w: packet %d is incomplete", ErrCutShort, n)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("%w: read packet %d: %w", ErrCutShort, n, err)
		}
		p, known := unwrap(rec)
		for _, t := range on {
			if !known {
				t.skip(rec.Link)
				continue
			}
			t.note(rec)
			if err := t.packet(p, rec.At.UnixNano()); err != nil {
				return fmt.Errorf("packet %d: %w", n, err)
			}
		}
	}
}

// unwrap removes the capture's header before an IP packet. It empties other packets, because their
// first bytes could resemble an IP header. known is false for an unknown link type.
func unwrap(rec pcap.Record) (p expr.Packet, known bool) {
	p = expr.Packet{Data: rec.Data, Missing: min(rec.Wire, pcap.MaxPacket) - len(rec.Data), Layer: expr.Network}
	header, protocol := 0, 0 // length of the header, offset of the EtherType
	switch rec.Link {
	case layers.LinkTypeEthernet:
		p.Layer = expr.Link
		return p, true
	case layers.LinkTypeRaw, layers.LinkTypeIPv4, layers.LinkTypeIPv6, linkOldRaw:
		return p, true
	case layers.LinkTypeLinuxSLL:
		header, protocol = sllHeader, sllHeader-2
	case layers.LinkTypeLinuxSLL2:
		header, protocol = sll2Header, 0
	case layers.LinkTypeNull, layers.LinkTypeLoop:
		pass(&p, nullHeader) // systems number families differently
		return p, true
	default:
		return p, false
	}
	if len(p.Data) < protocol+2 {
		pass(&p, header)
		return p, true
	}
	kind := layers.EthernetType(binary.BigEndian.Uint16(p.Data[protocol:]))
	pass(&p, header)
	for (kind == layers.EthernetTypeDot1Q || kind == layers.EthernetTypeQinQ) && len(p.Data) >= 4 {
		kind = layers.EthernetType(binary.BigEndian.Uint16(p.Data[2:]))
		pass(&p, 4)
	}
	tagCut := (kind == layers.EthernetTypeDot1Q || kind == layers.EthernetTypeQinQ) && p.Missing > 0
	if kind != layers.EthernetTypeIPv4 && kind != layers.EthernetTypeIPv6 && !tagCut {
		return expr.Packet{Layer: expr.Network}, true
	}
	if tagCut {
		pass(&p, 4)
	}
	return p, true
}

// pass skips n bytes, including bytes missing from the capture.
func pass(p *expr.Packet, n int) {
	there := min(n, len(p.Data))
	p.Data, p.Missing = p.Data[there:], p.Missing-(n-there)
}
