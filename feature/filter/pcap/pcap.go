// SPDX-License-Identifier: Apache-2.0

// Package pcap reads the packets of captures in the formats pcap and pcapng.
package pcap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// Record is one packet of a capture.
type Record struct {
	Data []byte
	Wire int // original length in bytes
	Link layers.LinkType
	At   time.Time
}

// MaxPacket is the maximum size of a captured packet in bytes, as in Wireshark.
const MaxPacket = 256 << 10

// Magic numbers of pcap files: https://www.tcpdump.org/manpages/pcap-savefile.5.html.
const (
	pcapMicro    = 0xa1b2c3d4
	pcapNano     = 0xa1b23c4d
	pcapModified = 0xa1b2cd34 // Kuznetzov's patched format: records have 8 more bytes
)

// Records reads pcap. Like Wireshark, and unlike pcapgo, it accepts records longer than their
// packets, and files of old and patched versions.
type Records struct {
	r     io.Reader
	order binary.ByteOrder
	unit  time.Duration
	head  []byte // of a record
	minor uint16
	link  layers.LinkType
}

// New reads the header of a capture in the format pcap.
func New(r io.Reader) (*Records, error) {
	head := make([]byte, 24)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, fmt.Errorf("incomplete header: %w", err)
	}
	p := &Records{r: r, unit: time.Microsecond, head: make([]byte, 16)}
	for _, p.order = range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		switch p.order.Uint32(head) {
		case pcapNano:
			p.unit = time.Nanosecond
		case pcapModified:
			p.head = make([]byte, 24)
		case pcapMicro:
		default:
			continue
		}
		p.minor = p.order.Uint16(head[6:])
		if major := p.order.Uint16(head[4:]); major != 2 {
			return nil, fmt.Errorf("unsupported version %d.%d", major, p.minor)
		}
		p.link = layers.LinkType(p.order.Uint32(head[20:])) // the upper half describes checksums after frames
		return p, nil
	}
	return nil, fmt.Errorf("unknown magic %x", head[:4])
}

// Next returns the next packet. The error is [io.EOF] behind the last one.
func (p *Records) Next() (rec Record, err error) {
	if _, err := io.ReadFull(p.r, p.head); err != nil {
		return rec, err // io.EOF between two records
	}
	have, had := p.order.Uint32(p.head[8:]), p.order.Uint32(p.head[12:])
	if p.minor < 3 || p.minor == 3 && have > had { // versions before 2.3, and some files of 2.3, have the two swapped
		have, had = had, have
	}
	if have > MaxPacket {
		return rec, fmt.Errorf("%d bytes exceed the limit of %d", have, MaxPacket)
	}
	rec = Record{Data: make([]byte, have), Wire: int(had), Link: p.link,
		At: time.Unix(int64(p.order.Uint32(p.head)), int64(p.order.Uint32(p.head[4:]))*int64(p.unit))}
	if _, err := io.ReadFull(p.r, rec.Data); err != nil {
		return rec, io.ErrUnexpectedEOF
	}
	return rec, nil
}

// NGRecords reads pcapng. Each interface has its own link type.
type NGRecords struct{ *pcapgo.NgReader }

// NewNG reads the header of a capture in the format pcapng.
func NewNG(r io.Reader) (*NGRecords, error) {
	p, err := pcapgo.NewNgReader(r, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	return &NGRecords{p}, err
}

// Next returns the next packet. The error is [io.EOF] behind the last one.
func (p *NGRecords) Next() (Record, error) {
	data, ci, err := p.ReadPacketData()
	if errors.Is(err, io.EOF) && ci.CaptureLength > 0 {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return Record{}, err
	}
	in, err := p.Interface(ci.InterfaceIndex)
	return Record{data, ci.Length, in.LinkType, exact(ci.Timestamp, in.TimestampResolution)}, err
}

// exact corrects timestamps in units of 2^-n seconds. pcapgo converts them to nanoseconds with a
// truncated integer factor.
func exact(at time.Time, unit pcapgo.NgResolution) time.Time {
	if !unit.Binary() {
		return at
	}
	second := uint64(1) << unit.Exponent()
	up, down := max(1, 1e9/second), max(1, second/1e9)
	ticks := float64(at.Nanosecond()) * float64(down) / float64(up)
	return time.Unix(at.Unix(), int64(ticks/float64(second)*1e9))
}
