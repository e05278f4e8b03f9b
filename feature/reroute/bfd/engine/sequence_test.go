// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
)

// The first sequence number of a session is random (RFC 5880 section 6.8.1). With a constant one, packets of an
// earlier session would be valid. Later numbers follow.
func TestFirstSequence(t *testing.T) {
	b := newBench(t)
	key := &bfd.Key{Type: bfd.MeticulousSHA1, ID: 7, Secret: []byte("something secret")}
	s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: time.Second, RequiredRx: time.Second},
		Local: local4, Peer: peer4, Ifindex: b.index, SourcePort: 50000, Key: key}
	next := func() uint32 {
		t.Helper()
		b.at(0)
		b.tick()
		b.now += time.Second
		f := b.sent()
		if f == nil {
			t.Fatal("nothing is sent")
		}
		p, err := bfdtest.Parse(f[42:])
		if err != nil {
			t.Fatal(err)
		}
		return p.Auth.Sequence
	}
	const sessions = 8
	seen, small := map[uint32]bool{}, 0
	for generation := range uint32(sessions) {
		if err := b.w.put(0, s, generation+1); err != nil {
			t.Fatal(err)
		}
		first := next()
		if seen[first] {
			t.Errorf("%d is the first of two sessions", first)
		}
		if seen[first] = true; first < 1<<20 {
			small++
		}
		if second := next(); second != first+1 {
			t.Errorf("%d is followed by %d", first, second)
		}
		if err := b.w.remove(0); err != nil {
			t.Fatal(err)
		}
	}
	if small > sessions/2 {
		t.Errorf("small numbers: %v", seen)
	}
	// The greatest number is followed by 0: numbers are circular (section 6.7.4).
	if err := b.w.put(0, s, sessions+1); err != nil {
		t.Fatal(err)
	}
	if err := b.w.states.Put(uint32(0), bpf.BfdBfdState{SentSequence: 1<<32 - 2}); err != nil {
		t.Fatal(err)
	}
	if a, b := next(), next(); a != 1<<32-1 || b != 0 {
		t.Errorf("%d is followed by %d", a, b)
	}
}
