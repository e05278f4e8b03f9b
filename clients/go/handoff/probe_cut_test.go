// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// TestProbeCutTransfer stops a keeper for longer than a transfer timeout. The member gets an error,
// because the owner is unknown, and can close the session at once or later. If the keeper rejects
// the transfer, the close ends the connection. If the keeper carries it out, the session continues
// with the other member.
func TestProbeCutTransfer(t *testing.T) {
	for language, command := range probes(t) {
		for _, c := range []struct {
			name         string
			to           string
			early, moves bool // closed before the keeper continues; the transfer succeeds
		}{{"refused, closed early", "nobody", true, false}, {"refused, closed late", "nobody", false, false}, {"made, closed late", "1", false, true}} {
			t.Run(language+"/"+c.name, func(t *testing.T) {
				nstest.NeedRoot(t)
				t.Parallel() // mostly waiting
				w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
				k := nstest.StartReady(t, nstest.Child("keeper", w.socket))
				p := w.probe("0", w.address, command...)
				other := w.probe("1", freeAddress(t), command...)
				peer := w.connect(p)
				p.want("commit 0 16", "0")
				stop(t, k)
				if got, took := p.says(patience, "transfer 0 17 "+c.to); got != "-1 ESTALE" || took < 4900*time.Millisecond {
					t.Errorf("a transfer without an answer: %s after %v", got, took)
				}
				for _, order := range []string{"recv 0 10", "send 0 10", "commit 0 18", "transfer 0 18 1"} {
					p.want(order, "-1 ESTALE")
				}
				if c.early {
					p.want("close 0", "0")
				}
				k.Signal(syscall.SIGCONT)
				p.want("idle 1500", "0") // it reconnects to the keeper
				if !c.early {
					p.want("recv 0 10", "-1 ESTALE")
					p.want("close 0", "0")
				}
				if !c.moves {
					p.ends(peer)
					return
				}
				peer.SetReadDeadline(time.Now().Add(patience))
				other.want("accept 30000", "1")
				if _, err := peer.Write([]byte("1234567")); err != nil {
					t.Error(err)
				}
				nstest.Until(t, "the other reads", func() bool { got, _ := other.says(patience, "recv 0 10"); return got == "7" })
				other.want("commit 0 19", "0")
				other.want("send 0 10", "10")
				if n, err := io.ReadFull(peer, make([]byte, 10)); err != nil {
					t.Errorf("%d bytes, %v", n, err)
				}
			})
		}
	}
}

// TestProbeCutTransferAndNoKeeper checks that a close ends a session after an interrupted transfer,
// without the next keeper, if no other owner can exist.
func TestProbeCutTransferAndNoKeeper(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			nstest.NeedRoot(t)
			w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
			d := w.dies()
			p := w.probe("0", w.address, command...)
			peer := w.connect(p)
			p.want("commit 0 16", "0")
			p.Tell("transfer 0 17 1")
			<-d.asked
			d.mu.Lock()
			d.end()
			d.mu.Unlock()
			d.all.Wait()
			if line, _ := p.Line(); line[:len("transfer -1 ESTALE")] != "transfer -1 ESTALE" {
				t.Error(line)
			}
			p.want("close 0", "0")
			p.ends(peer)
		})
	}
}

// ends checks that a peer's connection ends while the probe serves its events. The time to
// reconnect to the keeper depends on the load of the machine.
func (p *probe) ends(peer net.Conn) {
	p.t.Helper()
	nstest.Eventually(p.t, func() error {
		p.want("idle 100", "0")
		peer.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := peer.Read(make([]byte, 1)); err != io.EOF {
			return fmt.Errorf("the peer: %v, want the end", err)
		}
		return nil
	})
}

// TestProbeNextKeeperOfTheReplaced restarts the keeper during a hot restart. Sessions of the old
// process not yet handed over go to the next keeper and then to the new process. The old process
// gets nothing, and the new one has the listener.
func TestProbeNextKeeperOfTheReplaced(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			k := newKeepers(t)
			p := k.probe("0", k.address, command...)
			peers := []net.Conn{k.connect(p), k.connect(p), k.connect(p)}
			for _, order := range []string{"commit 0 16", "commit 1 17", "commit 2 18"} {
				p.want(order, "0")
			}
			next := k.probe("0", k.address, command...)
			p.want("idle 500", "0")
			p.want("transfer 0 16 0", "0")
			next.want("accept 30000", "1")
			k.end()
			k.start()
			next.want("idle 1000", "0")
			p.want("idle 1000", "0")
			if s, l := k.sessions("session"), k.sessions("listener"); len(s) != 3 || len(l) != 1 || l[0].PID != next.PID() {
				t.Fatalf("the next keeper has %+v, %+v; the new process is %d", s, l, next.PID())
			}
			p.want("transfer 1 17 0", "0")
			next.want("accept 30000", "1")
			k.end()
			k.start()
			next.want("idle 1000", "0")
			nstest.Until(t, "a commit goes to the next keeper, too", func() bool { got, _ := p.says(patience, "commit 2 20"); return got == "0" })
			p.want("transfer 2 20 0", "0")
			next.want("accept 30000", "1")
			p.Kill()
			k.connect(next)
			for i, c := range peers {
				if _, err := c.Write([]byte("1234567")); err != nil {
					t.Error(err)
				}
				nstest.Until(t, "the new process has it", func() bool {
					got, _ := next.says(patience, "recv "+string(rune('0'+i))+" 10")
					return got == "7"
				})
			}
		})
	}
}
