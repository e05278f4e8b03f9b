// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"

	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/guard/scenario"
)

// TestBatchIsProgram compares a run for each packet, runs of many packets, and both in turn: all
// verdicts are equal.
func TestBatchIsProgram(t *testing.T) {
	need(t)
	if err := needBatch(); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("need: kernel with bpf_loop: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	for _, ipv6 := range []bool{false, true} {
		s, err := scenario.Lookup("changing")
		if err != nil {
			t.Fatal(err)
		}
		s = s.Shortened()
		each := newGuard(t, Options{Limit: s.Limit, IPv6: ipv6, Hook: guard.Socket, Seed: 7})
		whole := newGuard(t, Options{Limit: s.Limit, IPv6: ipv6, Hook: guard.Socket, Seed: 7, Batch: true})
		trace := s.Trace(7)
		packets, verdicts := make([]scenario.Packet, 5000), make([]bool, 5000) // more than a batch
		seen, passed := 0, 0
		for turn := 0; ; turn++ {
			n := trace.Next(packets)
			if n == 0 {
				break
			}
			if turn%3 == 2 { // by the program, continuing from the batches' state
				for i := range n {
					if verdicts[i], err = whole.Passes(packets[i].At, whole.Frame(&packets[i])); err != nil {
						t.Fatal(err)
					}
				}
			} else if err := whole.Decide(packets[:n], verdicts[:n]); err != nil {
				t.Fatal(err)
			}
			for i := range n {
				want, err := each.Passes(packets[i].At, each.Frame(&packets[i]))
				if err != nil {
					t.Fatal(err)
				}
				if verdicts[i] != want {
					t.Fatalf("IPv6 %t, packet %d: %t in a batch, %t by the program", ipv6, seen+i, verdicts[i], want)
				}
				if want {
					passed++
				}
			}
			seen += n
		}
		if passed == 0 || passed == seen {
			t.Errorf("IPv6 %t: %d of %d packets passed: the test compares nothing", ipv6, passed, seen)
		}
		if a, b := each.Counts(packets[0].At), whole.Counts(packets[0].At); a.Passed != b.Passed || a.Refused != b.Refused {
			t.Errorf("IPv6 %t: counted %d and %d passed, %d and %d refused", ipv6, a.Passed, b.Passed, a.Refused, b.Refused)
		}
	}
}

// needBatch returns an error if this kernel cannot decide many packets in one run.
func needBatch() error {
	err := features.HaveProgramHelper(ebpf.SocketFilter, asm.FnLoop)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("this kernel has no bpf_loop (Linux 5.17): %w", err)
	}
	return err
}
