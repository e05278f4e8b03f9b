// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/feature/filter/pcap"
)

// recorded is the encoded form of a record.
type recorded struct {
	data       []byte
	have, wire uint32
}

func recordOf(data []byte) recorded { return recorded{data, uint32(len(data)), uint32(len(data))} }

// pcapFile encodes a pcap file.
func pcapFile(order binary.AppendByteOrder, magic uint32, minor uint16, extra int, records ...recorded) []byte {
	b := order.AppendUint32(nil, magic)
	b = order.AppendUint16(order.AppendUint16(b, 2), minor)
	b = append(b, make([]byte, 8)...)
	b = order.AppendUint32(order.AppendUint32(b, 65535), uint32(layers.LinkTypeEthernet))
	for _, r := range records {
		for _, v := range []uint32{1700000000, 5, r.have, r.wire} {
			b = order.AppendUint32(b, v)
		}
		b = append(append(b, make([]byte, extra)...), r.data...)
	}
	return b
}

// times returns the timestamps of a capture's records.
func times(t *testing.T, capture []byte) (out []time.Time) {
	t.Helper()
	next := func() (pcap.Record, error) { return pcap.Record{}, errors.New("no reader") }
	if binary.BigEndian.Uint32(capture) == pcapngMagic {
		p, err := pcap.NewNG(bytes.NewReader(capture))
		if err != nil {
			t.Fatal(err)
		}
		next = p.Next
	} else if p, err := pcap.New(bytes.NewReader(capture)); err == nil {
		next = p.Next
	}
	for {
		rec, err := next()
		if err != nil {
			return out
		}
		out = append(out, rec.At)
	}
}

// All variants of pcap are read like tshark reads them. Incomplete and odd records are counted.
func TestOddPcap(t *testing.T) {
	f := frame(t, 53, 100) // 142 bytes
	whole := recordOf(f)
	for name, c := range map[string]struct {
		file    []byte
		unit    time.Duration
		packets uint64
		want    TrialResult
		fails   string
	}{
		"little":         {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, whole, whole), time.Microsecond, 2, TrialResult{Packets: 2}, ""},
		"big":            {pcapFile(binary.BigEndian, 0xa1b2c3d4, 4, 0, whole, whole), time.Microsecond, 2, TrialResult{Packets: 2}, ""},
		"nanoseconds":    {pcapFile(binary.LittleEndian, 0xa1b23c4d, 4, 0, whole), time.Nanosecond, 1, TrialResult{Packets: 1}, ""},
		"big and ns":     {pcapFile(binary.BigEndian, 0xa1b23c4d, 4, 0, whole), time.Nanosecond, 1, TrialResult{Packets: 1}, ""},
		"patched":        {pcapFile(binary.BigEndian, 0xa1b2cd34, 4, 8, whole, whole), time.Microsecond, 2, TrialResult{Packets: 2}, ""},
		"old, swapped":   {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 3, 0, recorded{f, 150, 142}, whole), time.Microsecond, 2, TrialResult{Packets: 2, Cut: 1}, ""},
		"cut":            {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, recorded{f[:60], 60, 142}, whole), time.Microsecond, 2, TrialResult{Packets: 2, Cut: 1}, ""},
		"cut in udp":     {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, recorded{f[:37], 37, 142}, whole), time.Microsecond, 1, TrialResult{Packets: 2, Cut: 1, Undecided: 1}, ""},
		"cut to nothing": {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, recorded{nil, 0, 142}), time.Microsecond, 0, TrialResult{Packets: 1, Cut: 1, Undecided: 1}, ""},
		"empty":          {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, recorded{nil, 0, 0}, whole), time.Microsecond, 1, TrialResult{Packets: 2, Empty: 1}, ""},
		"longer":         {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, whole, recorded{f, 142, 50}, whole), time.Microsecond, 3, TrialResult{Packets: 3, Odd: 1}, ""},
		"of 4 GB":        {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, recorded{f, 142, 4e9}), time.Microsecond, 1, TrialResult{Packets: 1, Cut: 1}, ""},
		"too long":       {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, whole, recorded{nil, 1 << 20, 1 << 20}), time.Microsecond, 1, TrialResult{Packets: 1}, "read packet 2: 1048576 bytes exceed"},
		"ends within":    {pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, whole, recorded{f[:50], 142, 142}), time.Microsecond, 1, TrialResult{Packets: 1}, "packet 2 is incomplete"},
	} {
		t.Run(name, func(t *testing.T) {
			trial, err := NewTrial(Filter{Hook: HookTCX, Rules: []Rule{{Match: Expression{Text: "udp.dstport == 53"}, Action: Count}}}, true)
			if err != nil {
				t.Fatal(err)
			}
			defer trial.Close()
			err = trial.Capture(bytes.NewReader(c.file))
			if (err != nil) != (c.fails != "") || err != nil && (!errors.Is(err, ErrCutShort) || !strings.Contains(err.Error(), c.fails)) {
				t.Errorf("%v, want %q", err, c.fails)
			}
			got, err := trial.Result()
			if err != nil {
				t.Fatal(err)
			}
			if n := got.Rules[0].Packets; n != c.packets || got.Rules[0].Undecided != c.want.Undecided {
				t.Errorf("%d packets match, %d are undecided, want %d and %d", n, got.Rules[0].Undecided, c.packets, c.want.Undecided)
			}
			if got.Packets != c.want.Packets || got.Cut != c.want.Cut || got.Undecided != c.want.Undecided || got.Odd != c.want.Odd || got.Empty != c.want.Empty {
				t.Errorf("%+v, want %+v", got, c.want)
			}
			for _, at := range times(t, c.file) {
				if want := time.Unix(1700000000, 5*int64(c.unit)); !at.Equal(want) {
					t.Errorf("got a packet at %s, want %s", at, want)
				}
			}
		})
	}
}

// block encodes a pcapng block.
func block(kind uint32, body []byte) []byte {
	le := binary.LittleEndian
	for len(body)%4 != 0 {
		body = append(body, 0)
	}
	n := uint32(12 + len(body))
	return le.AppendUint32(append(le.AppendUint32(le.AppendUint32(nil, kind), n), body...), n)
}

// inter encodes an interface with a link type and, unless 0, a timestamp resolution.
func inter(link layers.LinkType, resolution byte) []byte {
	b := binary.LittleEndian.AppendUint16(nil, uint16(link))
	b = append(b, 0, 0, 0, 0, 0, 0)
	if resolution != 0 {
		b = append(b, 9, 0, 1, 0, resolution, 0, 0, 0, 0, 0, 0, 0)
	}
	return block(1, b)
}

// enhanced encodes a packet of an interface.
func enhanced(in uint32, ticks uint64, r recorded) []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(nil, in)
	for _, v := range []uint32{uint32(ticks >> 32), uint32(ticks), r.have, r.wire} {
		b = le.AppendUint32(b, v)
	}
	return block(6, append(b, r.data...))
}

// The file has interfaces of several link types and resolutions, simple packets truncated to the
// snaplen of their interface, and odd records.
func TestOddPcapng(t *testing.T) {
	f := frame(t, 53, 100)
	section := block(pcapngMagic, []byte("\x4d\x3c\x2b\x1a\x01\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff"))
	short := inter(layers.LinkTypeEthernet, 0)
	binary.LittleEndian.PutUint32(short[12:], 60)
	const s = 1700000000
	file := slices.Concat(section, inter(layers.LinkTypeEthernet, 0), inter(layers.LinkTypeRaw, 9), inter(layers.LinkTypeIEEE802_11, 3), inter(layers.LinkTypeEthernet, 0x80|32), inter(147, 0x80|20),
		enhanced(0, s*1e6+500000, recordOf(f)), enhanced(1, s*1e9+5e8, recordOf(f[14:])), enhanced(2, s*1000+500, recordOf(f)), enhanced(3, s<<32|1<<31, recordOf(f)), enhanced(4, s<<20|1<<19, recordOf(f)),
		enhanced(0, s*1e6+500000, recorded{f[:60], 60, 142}), enhanced(0, s*1e6+500000, recorded{f, 142, 50}), enhanced(0, s*1e6+500000, recorded{}),
		section, short, block(3, append([]byte{142, 0, 0, 0}, f[:60]...)))
	rules := []Rule{{Match: Expression{Text: "udp.dstport == 53"}, Action: Count}, {Match: Expression{Text: "len(payload) == 100"}, Action: Count}, {Match: Expression{Text: "payload[90] == 0"}, Action: Count}}
	for _, interpret := range []bool{true, false} {
		r := tried(t, Filter{Hook: HookTCX, Rules: rules}, interpret, file)
		if r.Packets != 7 || r.Skipped != 2 || r.Cut != 2 || r.Undecided != 2 || r.Odd != 1 || r.Empty != 1 || !slices.Equal(r.SkippedLink, []string{"802.11", "147"}) {
			t.Errorf("%+v", r)
		}
		for i, want := range []RuleState{{Packets: 6}, {Packets: 6}, {Packets: 4, Undecided: 2}} {
			if got := r.Rules[i]; got.Packets != want.Packets || got.Undecided != want.Undecided {
				t.Errorf("%s: %d packets and %d undecided, want %d and %d", got.Match, got.Packets, got.Undecided, want.Packets, want.Undecided)
			}
		}
		if got, want := r.Rules[0].Bytes, uint64(5*142+128); got != want {
			t.Errorf("got %d bytes, want the %d bytes on the wire", got, want)
		}
	}
	for i, at := range times(t, file)[:8] {
		if want := time.Unix(s, 5e8); at.Sub(want).Abs() > time.Microsecond {
			t.Errorf("packet %d: got time %s, want %s", i+1, at, want)
		}
	}
}

// After an undecidable rule with a deciding action, no further rule is evaluated for a truncated
// packet and the default is not counted.
func TestUndecided(t *testing.T) {
	f := frame(t, 53, 100)
	file := pcapFile(binary.LittleEndian, 0xa1b2c3d4, 4, 0, recorded{f[:60], 60, 142}, recordOf(f))
	rules := []Rule{{Match: Expression{Text: "payload[90] == 1"}, Action: Count}, {Match: Expression{Text: `payload contains "x"`}, Action: Drop}, drops(53)}
	for _, interpret := range []bool{true, false} {
		r := tried(t, Filter{Hook: HookTCX, Rules: rules}, interpret, file)
		if a, b, c := r.Rules[0], r.Rules[1], r.Rules[2]; a.Undecided != 1 || a.Packets != 0 || b.Undecided != 1 || b.Packets != 0 || c.Undecided != 0 || c.Packets != 1 || r.Default.Packets != 0 || r.Undecided != 1 {
			t.Errorf("%+v", r)
		}
	}
}
