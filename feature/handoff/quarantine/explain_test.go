// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/nstest"
)

// TestExplain compares Explain's text for each state of a session with the quarantine's counts for a real packet.
func TestExplain(t *testing.T) {
	for name, tcx := range map[string]bool{"tcx": true, "filters": false} {
		if tcx && !hasTCX() {
			continue // this kernel has only filters
		}
		t.Run(name, func(t *testing.T) { newRaw(t, tcx).explains() })
	}
}

const explainedPort = 7000 // of the client

// explain explains a packet of the session.
func (r *raw) explain(device string) []feature.Verdict {
	r.Helper()
	all, err := Explain(r.root(), feature.Packet{Proto: "tcp", From: netip.AddrPortFrom(rawClient, explainedPort), To: netip.AddrPortFrom(rawBackend, rawPort),
		Inode: r.server.Inode(), Interface: device})
	if err != nil {
		r.Fatal(err)
	}
	return all
}

func (r *raw) explains() {
	f := repair.Flow{Local: netip.AddrPortFrom(rawBackend, rawPort), Remote: netip.AddrPortFrom(rawClient, explainedPort)}
	do := func(err error) {
		r.Helper()
		if err != nil {
			r.Fatal(err)
		}
	}
	told := func(text, result string) {
		r.Helper()
		all := r.explain("w0")
		if len(all) != 1 || all[0].Stage != feature.StageTC || all[0].Order < 1 || !strings.Contains(all[0].Text, text) || all[0].Result != result {
			r.Fatalf("%+v: want %q, and %q", all, text, result)
		}
	}
	// counted sends a packet, and expects it in a counter.
	counted := func(of func(Counts) uint64) {
		r.Helper()
		before, err := r.quarantine.Counts()
		do(err)
		r.send(packet6(rawBackend, segment(rawClient, rawBackend, explainedPort, rawPort), 6))
		nstest.Eventually(r.T, func() error {
			if now, err := r.quarantine.Counts(); err != nil || of(now) == of(before) {
				return fmt.Errorf("%+v, %w: the packet is not counted", now, err)
			}
			return nil
		})
	}
	passes := func() {
		r.Helper()
		r.send(packet6(rawBackend, segment(rawClient, rawBackend, explainedPort, rawPort), 6))
		if !r.reset(explainedPort, resetTime) {
			r.Error("the packet does not pass")
		}
	}
	told("no session between these addresses is moving", "")
	passes()
	do(r.quarantine.Buffer(f, 3))
	told("the session leaves this backend (epoch 3)", "buffered at "+bufferName+": the session leaves this backend")
	counted(func(c Counts) uint64 { return c.Buffered })
	do(r.quarantine.Release(f, 3, Pass))
	told("departure was abandoned", "")
	passes()
	do(r.quarantine.Quiet(f, 4))
	told("arrives at this backend (epoch 4): the packet passes", "")
	counted(func(c Counts) uint64 { return c.Mute })
	do(r.quarantine.Shut(f, 5))
	nstest.Eventually(r.T, func() error {
		if all := r.explain("w0"); len(all) != 1 || all[0].Result != "dropped: the session leaves this backend" {
			return fmt.Errorf("%+v: want the packet dropped", all)
		}
		return nil
	})
	told("the session leaves this backend (epoch 5)", "dropped: the session leaves this backend")
	counted(func(c Counts) uint64 { return c.Deaf })
	do(r.quarantine.remember(f, 5, 7))
	told("the session has left for backend number 7", "")
	counted(func(c Counts) uint64 { return c.Strays })
	if all := r.explain("w1"); len(all) != 1 || !strings.Contains(all[0].Text, "attached to w0, not to w1") {
		r.Errorf("at another device: %+v", all)
	}
	r.quarantine.buffer.Close()
	do(r.quarantine.put(f, Buffered, 6))
	told("the session leaves this backend (epoch 6)", "dropped: the session leaves this backend, and the agent with its buffered packets is gone: run weir serve")
}
