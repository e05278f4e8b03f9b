// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bufio"
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

// Capture tries every packet of a capture, pcap or pcapng.
func (t *Trial) Capture(r io.Reader) error {
	b := bufio.NewReaderSize(r, 1<<16)
	magic, err := b.Peek(4)
	if err != nil {
		return fmt.Errorf("no capture: %w", err)
	}
	if binary.BigEndian.Uint32(magic) != pcapngMagic {
		p, err := pcapgo.NewReader(b)
		if err != nil {
			return fmt.Errorf("neither pcap nor pcapng: %w", err)
		}
		return t.capture(p.ReadPacketData, func(int) layers.LinkType { return p.LinkType() })
	}
	p, err := pcapgo.NewNgReader(b, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	if err != nil {
		return fmt.Errorf("pcapng: %w", err)
	}
	return t.capture(p.ReadPacketData, func(i int) layers.LinkType {
		in, err := p.Interface(i)
		if err != nil {
			return p.LinkType()
		}
		return in.LinkType
	})
}

func (t *Trial) capture(read func() ([]byte, gopacket.CaptureInfo, error), linkType func(int) layers.LinkType) error {
	for n := 1; ; n++ {
		data, ci, err := read()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("packet %d: %w", n, err)
		}
		packet, ethernet, ok := unwrap(data, linkType(ci.InterfaceIndex))
		if !ok {
			t.Skip()
			continue
		}
		if err := t.Packet(packet, ethernet, ci.Timestamp.UnixNano()); err != nil {
			return fmt.Errorf("packet %d: %w", n, err)
		}
	}
}

// unwrap takes away what a capture puts before an IP packet.
func unwrap(data []byte, link layers.LinkType) (packet []byte, ethernet, ok bool) {
	header := 0
	switch link {
	case layers.LinkTypeEthernet:
		return data, true, true
	case layers.LinkTypeRaw, layers.LinkTypeIPv4, layers.LinkTypeIPv6, linkOldRaw:
	case layers.LinkTypeLinuxSLL:
		header = sllHeader
	case layers.LinkTypeLinuxSLL2:
		header = sll2Header
	case layers.LinkTypeNull, layers.LinkTypeLoop:
		header = nullHeader
	default:
		return nil, false, false
	}
	if len(data) < header {
		return nil, false, false
	}
	return data[header:], false, true
}
