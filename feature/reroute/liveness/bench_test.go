// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/kernel"
)

// siphash is SipHash-1-3, for signatures in tests.
func siphash(k [2]uint64, msg []byte) uint64 {
	v := [4]uint64{k[0] ^ 0x736f6d6570736575, k[1] ^ 0x646f72616e646f6d, k[0] ^ 0x6c7967656e657261, k[1] ^ 0x7465646279746573}
	round := func() {
		v[0] += v[1]
		v[2] += v[3]
		v[1], v[3] = bits.RotateLeft64(v[1], 13)^v[0], bits.RotateLeft64(v[3], 16)^v[2]
		v[0] = bits.RotateLeft64(v[0], 32)
		v[2] += v[1]
		v[0] += v[3]
		v[1], v[3] = bits.RotateLeft64(v[1], 17)^v[2], bits.RotateLeft64(v[3], 21)^v[0]
		v[2] = bits.RotateLeft64(v[2], 32)
	}
	length := uint64(len(msg)) << 56
	for ; len(msg) >= 8; msg = msg[8:] {
		m := binary.LittleEndian.Uint64(msg)
		v[3] ^= m
		round()
		v[0] ^= m
	}
	for i, b := range msg {
		length |= uint64(b) << (8 * i)
	}
	v[3] ^= length
	round()
	v[0] ^= length
	v[2] ^= 0xff
	for range 3 {
		round()
	}
	return v[0] ^ v[1] ^ v[2] ^ v[3]
}

// The reference is another implementation: Python 3.11's hash of bytes with PYTHONHASHSEED=0.
func TestSipHash(t *testing.T) {
	var msg []byte
	for i := range byte(72) {
		msg = append(msg, i)
	}
	for n, want := range map[int]uint64{72: 0x04bde5b7ae0e11c2, 15: 0xf30eb725bb91c9ea} {
		if got := siphash([2]uint64{}, msg[:n]); got != want {
			t.Errorf("of %d bytes %x, want %x", n, got, want)
		}
	}
}

// bench runs the programs on packets with a clock set by the test.
type bench struct {
	t     testing.TB
	c     *kernel.Collection
	clock *ebpf.Variable
	maps  map[string]*ebpf.Map
	s     Session
	key   [2]uint64
	life  uint64
}

const start = 1_000_000_000_000 // ns

func newBench(t testing.TB) *bench {
	t.Helper()
	need(t)
	spec, err := bpf.LoadLiveness()
	if err != nil {
		t.Fatal(err)
	}
	if err := spec.Variables[bpf.LivenessVarLivenessClockGiven].Set(uint32(1)); err != nil {
		t.Fatal(err)
	}
	c, err := kernel.Load(spec, []string{bpf.LivenessProgLivenessTick, bpf.LivenessProgLivenessEndRun, bpf.LivenessProgLivenessReturn}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	b := &bench{t: t, c: c, clock: c.Variables[bpf.LivenessVarLivenessClock], maps: map[string]*ebpf.Map{}, key: [2]uint64{0x0706050403020100, 0x0f0e0d0c0b0a0908}, life: 77}
	for pin, name := range sharedMaps {
		b.maps[pin] = c.Maps[name]
	}
	b.s = Session{Name: "s", ID: 7, Mode: Active, Device: "lo", Peer: functionB, Source: netip.MustParseAddr("fd77::1"), Function: functionA,
		Interval: 10 * time.Millisecond, Multiplier: 3, StableFor: 1, StableMax: 1}.filled()
	b.put()
	b.at(0)
	return b
}

func (b *bench) put() {
	b.t.Helper()
	// Interface 0 does not exist: probes are counted as sent, but not sent.
	if err := b.maps[pinSetups].Put(uint32(0), b.s.setup(location{}, b.key, b.life)); err != nil {
		b.t.Fatal(err)
	}
	if err := putID(b.maps, b.s.ID, 0); err != nil {
		b.t.Fatal(err)
	}
	if err := b.maps[pinClockwork].Put(uint32(0), bpf.LivenessLivenessTickSource{Tick: uint64(b.s.Interval / 4), Loops: 1, Sessions: 1}); err != nil {
		b.t.Fatal(err)
	}
}

// at sets the clock, relative to start.
func (b *bench) at(d time.Duration) {
	b.t.Helper()
	if err := b.clock.Set(uint64(start + d)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) state() *bpf.LivenessLivenessState {
	b.t.Helper()
	s := &bpf.LivenessLivenessState{}
	if err := b.maps[pinStates].Lookup(uint32(0), s); err != nil {
		b.t.Fatal(err)
	}
	return s
}

// frame returns a probe of the peer on arrival at our segment: with the list advanced and the hop limit untouched.
func (b *bench) frame(seq uint32, got time.Duration) *bpf.LivenessLivenessFrame {
	peer := b.s
	peer.Source, peer.Peer = netip.MustParseAddr("fd77::2"), functionA
	f := peer.setup(location{}, b.key, b.life).Frame
	f.Srh.SegmentsLeft = 0
	f.Ip.Daddr = f.Seg[0]
	f.Tlv.Seq, f.Tlv.Sent = network32(seq), network64(12345)
	if got != 0 {
		f.Tlv.Got = network64(uint64(start + got))
	}
	return &f
}

// answer returns the peer's answer to a probe of ours, on arrival.
func (b *bench) answer(seq uint32) *bpf.LivenessLivenessFrame {
	f := b.s.setup(location{}, b.key, b.life).Frame
	f.Srh.SegmentsLeft = 0
	f.Ip.Daddr, f.Ip.HopLimit = f.Seg[0], 254
	f.Tlv.Kind, f.Tlv.Seq, f.Tlv.Heard = 1, network32(seq), network32(seq)
	f.Tlv.Sent, f.Tlv.Got = network64(b.state().SentAt[seq%64]), network64(start+uint64(seq))
	return &f
}

func raw(f *bpf.LivenessLivenessFrame) []byte {
	var buf bytes.Buffer
	binary.Write(&buf, binary.NativeEndian, f)
	return buf.Bytes()[2:]
}

func (b *bench) sign(f *bpf.LivenessLivenessFrame) []byte {
	data := raw(f)
	tlv := data[len(data)-64:]
	msg := append(bytes.Clone(tlv[:56]), f.Seg[0].Bytes[:]...)
	binary.LittleEndian.PutUint64(tlv[56:], siphash(b.key, msg))
	return data
}

func (b *bench) run(program string, data []byte) uint32 {
	b.t.Helper()
	ret, err := b.c.Programs[program].Run(&ebpf.RunOptions{Data: data})
	if err != nil {
		b.t.Fatal(err)
	}
	return ret
}

// counted returns the counts of the session and of unknown sources.
func (b *bench) counted() map[string]uint64 {
	b.t.Helper()
	out := map[string]uint64{}
	s := b.state()
	for i, reason := range reasons {
		var each []uint64
		if err := b.maps[pinCounts].Lookup(uint32(i), &each); err != nil {
			b.t.Fatal(err)
		}
		n := s.Counts[i]
		for _, v := range each {
			n += v
		}
		if n > 0 {
			out[reason] = n
		}
	}
	return out
}
