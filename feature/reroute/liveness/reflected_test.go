// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
)

// An own probe is rejected as the peer's, despite the shared key, and so is an own answer sent back. A reflected
// probe is dropped.
func TestReflectedProbe(t *testing.T) {
	const pass, taken, dropped = math.MaxUint32, 2, 2 // TC_ACT_UNSPEC, TC_ACT_SHOT, BPF_DROP
	own := func(b *bench) *bpf.LivenessLivenessFrame {
		f := b.s.setup(location{}, b.key, b.life).Frame
		f.Tlv.Seq, f.Tlv.Sent, f.Tlv.Got = network32(101), network64(start), network64(start+1)
		return &f
	}
	for _, c := range []struct {
		name, program string
		data          func(b *bench) []byte
		verdict       uint32
		forged        uint64
	}{
		{"a probe of ours at our function", bpf.LivenessProgLivenessEndRun, func(b *bench) []byte {
			f := own(b)
			f.Srh.SegmentsLeft, f.Ip.Daddr.Bytes = 0, functionA.As16()
			return b.sign(f)
		}, dropped, 1},
		{"as if it were later", bpf.LivenessProgLivenessEndRun, func(b *bench) []byte {
			f := own(b)
			f.Srh.SegmentsLeft, f.Ip.Daddr.Bytes, f.Tlv.Life = 0, functionA.As16(), network64(b.life+1)
			return b.sign(f)
		}, dropped, 1},
		{"as it was sent", bpf.LivenessProgLivenessReturn, func(b *bench) []byte { return b.sign(own(b)) }, taken, 1},
		{"forwarded, as it was sent", bpf.LivenessProgLivenessReturn, func(b *bench) []byte { f := own(b); f.Ip.HopLimit--; return b.sign(f) }, taken, 1},
		{"what only looks so", bpf.LivenessProgLivenessReturn, func(b *bench) []byte { o := *b; o.key[0]++; return o.sign(own(b)) }, pass, 0},
		{"a probe of the peer's on its way", bpf.LivenessProgLivenessReturn, func(b *bench) []byte {
			f := b.frame(101, 0)
			f.Srh.SegmentsLeft, f.Ip.Daddr.Bytes = 1, functionA.As16()
			return b.sign(f)
		}, pass, 0},
		{"an answer of ours", bpf.LivenessProgLivenessReturn, func(b *bench) []byte {
			f := b.answer(6)
			f.Seg[0].Bytes = netip.MustParseAddr("fd77::2").As16()
			return b.sign(f)
		}, taken, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.sent(10)
			b.at(time.Millisecond)
			b.run(bpf.LivenessProgLivenessEndRun, b.sign(b.frame(100, 0)))
			before := b.state()
			if v := b.run(c.program, c.data(b)); v != c.verdict {
				t.Errorf("%d, want %d", v, c.verdict)
			}
			if got := b.counted(); got["forged"] != c.forged || uint64(len(got)) != c.forged {
				t.Errorf("counted %v, want %d forged", got, c.forged)
			}
			s := b.state()
			if s.Counts = before.Counts; *s != *before || s.Heard != 1 {
				t.Error("it changed something")
			}
		})
	}
}
