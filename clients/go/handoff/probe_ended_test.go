// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// pair returns a connection without an owner: the peer's end, and our end with its number.
func pair(t *testing.T) (peer net.Conn, fd int, id uint64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peer = dial(t, l.Addr())
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	f, err := c.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	t.Cleanup(func() { f.Close() })
	if id, err = sock.Cookie(int(f.Fd())); err != nil {
		t.Fatal(err)
	}
	return peer, int(f.Fd()), id
}

// TestProbeKeeperEndsAfterGive kills a keeper after it gives a session, with unread data of the
// member, so the connection is reset. The session then exists only in that connection. The member
// accepts it in a wait and in a commit.
func TestProbeKeeperEndsAfterGive(t *testing.T) {
	for language, command := range probes(t) {
		for _, order := range []string{"accept 5000", "commit 0 17", "transfer 0 17 1"} {
			t.Run(language+"/"+order, func(t *testing.T) {
				nstest.NeedRoot(t)
				w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
				d := w.dies()
				p := w.probe("0", w.address, command...)
				w.connect(p)
				_, fd, id := pair(t)
				d.mu.Lock() // at most one of the two commits is read
				p.want("commit 0 16", "0")
				p.want("commit 0 16", "0")
				give := wire.Message{Type: wire.Give, Session: id, Number: uint32(wire.Stream), Name: "1", Text: "tcp " + w.address}
				err := d.mates["0"].Send(&give, fd)
				d.end()
				d.mu.Unlock()
				if err != nil {
					t.Fatal(err)
				}
				d.all.Wait()
				if !strings.HasPrefix(order, "accept") {
					for range 2 { // first it gets the reset, then the end
						if got, _ := p.says(patience, order); !strings.HasPrefix(got, "-1") {
							t.Errorf("%q without a keeper: %s", order, got)
						}
					}
				}
				p.want("accept 5000", "1")
				nstest.StartReady(t, nstest.Child("keeper", w.socket))
				for session := range 2 {
					nstest.Until(t, "the next keeper is given both", func() bool {
						p.says(patience, "accept 100")
						got, _ := p.says(patience, "commit "+string(rune('0'+session))+" 18")
						return got == "0"
					})
				}
			})
		}
	}
}

// TestProbeGivenAmidstTransfer checks that a session given during a transfer wakes a poll of the
// member's descriptor, although the connection has nothing left to read.
func TestProbeGivenAmidstTransfer(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			nstest.NeedRoot(t)
			w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
			d := w.dies()
			defer func() { d.end(); d.all.Wait() }()
			p := w.probe("0", w.address, command...)
			w.connect(p)
			peer, fd, id := pair(t)
			p.Tell("transfer 0 16 1")
			asked := <-d.asked
			d.mu.Lock()
			err := d.mates["0"].Send(&wire.Message{Type: wire.Give, Session: id, Number: uint32(wire.Stream), Name: "1", Text: "tcp " + w.address}, fd)
			refusal := wire.Message{Type: wire.Error, Seq: asked.Seq, Session: asked.Session, Number: uint32(wire.NoPeer), Text: "nobody is there"}
			if err == nil {
				err = d.mates["0"].Send(&refusal)
			}
			d.mu.Unlock()
			if err != nil {
				t.Fatal(err)
			}
			if line, _ := p.Line(); !strings.Contains(line, "nobody is there") {
				t.Fatal(line)
			}
			<-d.took
			p.want("idle 500", "0")
			peer.Close()
			nstest.Until(t, "the session is accepted", func() bool { got, _ := p.says(patience, "recv 1 10"); return got == "0" })
		})
	}
}
