// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// Lengths in bytes of what "cooked" captures (tcpdump -i any) and loopback devices
// of other systems put before an IP packet: https://www.tcpdump.org/linktypes.html.
const (
	sllHeader   = 16
	sll2Header  = 20
	nullHeader  = 4
	linkOldRaw  = layers.LinkType(12) // DLT_RAW, in old files
	pcapngMagic = 0x0a0d0d0a
)

// ErrCutShort is a capture that ends within a packet, as one does that was not
// closed, or that is damaged there. What lies before has been tried.
var ErrCutShort = errors.New("the capture is cut short")

// largestPacket is what a packet of a capture may have, in bytes, whatever its header
// says: some writers leave less there than they write.
const largestPacket = 256 << 10

// Capture tries every packet of a capture: pcap or pcapng, also compressed by gzip.
// Where it returns [ErrCutShort], Result has the packets before.
func (t *Trial) Capture(r io.Reader) error { return ReadCapture(r, t) }

// ReadCapture tries every packet of a capture on several filters.
func ReadCapture(r io.Reader, on ...*Trial) error {
	b, err := unzip(bufio.NewReaderSize(r, 1<<16))
	if err != nil {
		return err
	}
	magic, err := b.Peek(4)
	if errors.Is(err, io.EOF) && len(magic) == 0 {
		return errors.New("no capture: it is empty")
	} else if err != nil {
		return fmt.Errorf("no capture: %w", err)
	}
	if binary.BigEndian.Uint32(magic) != pcapngMagic {
		p, err := pcapgo.NewReader(b)
		if err != nil {
			return fmt.Errorf("neither pcap nor pcapng, as tcpdump -w and Wireshark write them: %w", err)
		}
		p.SetSnaplen(max(p.Snaplen(), largestPacket))
		return tryEach(on, p.ReadPacketData, func(int) layers.LinkType { return p.LinkType() })
	}
	p, err := pcapgo.NewNgReader(b, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	if err != nil {
		return fmt.Errorf("pcapng: %w", err)
	}
	return tryEach(on, p.ReadPacketData, func(i int) layers.LinkType {
		in, err := p.Interface(i)
		if err != nil {
			return p.LinkType()
		}
		return in.LinkType
	})
}

// unzip reads what gzip has compressed.
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

func tryEach(on []*Trial, read func() ([]byte, gopacket.CaptureInfo, error), linkType func(int) layers.LinkType) error {
	for n := 1; ; n++ {
		data, ci, err := read()
		switch {
		case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF) && ci.CaptureLength > 0:
			return fmt.Errorf("%w: it ends within packet %d", ErrCutShort, n)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("%w: packet %d cannot be read: %w", ErrCutShort, n, err)
		}
		packet, ethernet, ok := unwrap(data, linkType(ci.InterfaceIndex))
		for _, t := range on {
			if !ok {
				t.Skip()
			} else if err := t.Packet(packet, ethernet, ci.Timestamp.UnixNano()); err != nil {
				return fmt.Errorf("packet %d: %w", n, err)
			}
		}
	}
}

// unwrap takes away what a capture puts before an IP packet. What is no IP packet is
// empty then: its first bytes could look like one.
func unwrap(data []byte, link layers.LinkType) (packet []byte, ethernet, ok bool) {
	header, protocol := 0, 0 // where the packet begins, and where its EtherType is
	switch link {
	case layers.LinkTypeEthernet:
		return data, true, true
	case layers.LinkTypeRaw, layers.LinkTypeIPv4, layers.LinkTypeIPv6, linkOldRaw:
		return data, false, true
	case layers.LinkTypeLinuxSLL:
		header, protocol = sllHeader, sllHeader-2
	case layers.LinkTypeLinuxSLL2:
		header, protocol = sll2Header, 0
	case layers.LinkTypeNull, layers.LinkTypeLoop:
		if len(data) < nullHeader {
			return nil, false, false
		}
		return data[nullHeader:], false, true // systems number families differently
	default:
		return nil, false, false
	}
	if len(data) < header {
		return nil, false, false
	}
	kind, packet := layers.EthernetType(binary.BigEndian.Uint16(data[protocol:])), data[header:]
	for (kind == layers.EthernetTypeDot1Q || kind == layers.EthernetTypeQinQ) && len(packet) >= 4 {
		kind, packet = layers.EthernetType(binary.BigEndian.Uint16(packet[2:])), packet[4:]
	}
	if kind != layers.EthernetTypeIPv4 && kind != layers.EthernetTypeIPv6 {
		return nil, false, true
	}
	return packet, false, true
}
