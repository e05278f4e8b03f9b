// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
)

// repeated runs a program repeatedly on one packet.
func (b *bench) repeated(n int, program string, data []byte) {
	b.t.Helper()
	if _, err := b.c.Programs[program].Run(&ebpf.RunOptions{Data: data, Repeat: uint32(n)}); err != nil {
		b.t.Fatal(err)
	}
}

// An answer passing all checks, rejected at the end as a duplicate.
func BenchmarkReturn(b *testing.B) {
	x := newBench(b)
	s := x.state()
	s.Seq = 10
	if err := x.maps[pinStates].Put(uint32(0), s); err != nil {
		b.Fatal(err)
	}
	data := x.sign(x.answer(1))
	b.ResetTimer()
	x.repeated(b.N, bpf.LivenessProgLivenessReturn, data)
}

// A probe passing all checks, rejected at the end as a duplicate.
func BenchmarkEnd(b *testing.B) {
	x := newBench(b)
	data := x.sign(x.frame(1, 0))
	x.run(bpf.LivenessProgLivenessEndRun, data)
	b.ResetTimer()
	x.repeated(b.N, bpf.LivenessProgLivenessEndRun, data)
}

// One tick of benchSessions sessions. Each is judged and its probe is written, but not sent, because its device does
// not exist. The written probe resembles the loop's packet, so the next run accepts it.
func BenchmarkBeat(b *testing.B) {
	const benchSessions = 64
	x := newBench(b)
	for i := range uint32(benchSessions) {
		c := x.s.setup(location{}, x.key, x.life)
		f := &c.Frame
		f.Ip.Word, f.Ip.PayloadLen, f.Ip.Nexthdr, f.Ip.HopLimit = frameMagic, 0, 0, 0 // loop 0
		clear(f.Ip.Saddr.Bytes[:4])                                                   // generation 0
		c.Interval = 1                                                                // due at each tick
		if err := x.maps[pinSetups].Put(i, c); err != nil {
			b.Fatal(err)
		}
		if err := x.maps[pinStates].Put(i, bpf.LivenessLivenessState{LastSent: 1, MacKnown: 1, MacAt: start}); err != nil {
			b.Fatal(err)
		}
	}
	m := bpf.LivenessLivenessTickSource{Tick: uint64(10 * time.Millisecond), Loops: 1, Sessions: benchSessions}
	if err := x.maps[pinClockwork].Put(uint32(0), m); err != nil {
		b.Fatal(err)
	}
	data := beat()
	b.ResetTimer()
	x.repeated(b.N, bpf.LivenessProgLivenessTick, data)
	b.StopTimer()
	var last bpf.LivenessLivenessState
	if err := x.maps[pinStates].Lookup(uint32(benchSessions-1), &last); err != nil {
		b.Fatal(err)
	}
	if last.Seq != uint32(b.N) {
		b.Fatalf("%d probes in %d beats", last.Seq, b.N)
	}
}
