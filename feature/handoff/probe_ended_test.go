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

// pair is a connection that is nobody's yet: the peer's end, and ours with its number.
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

// A keeper gives a session and is killed, with something of that member unread, so that the connection is reset: the session
// is in it, and nowhere else. The member takes it, whether it hears of the end as it waits or as it commits.
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
				d.mu.Lock() // of two commits at most one is read
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
					for range 2 { // it is told that the connection was reset, then that it has ended
						if got, _ := p.says(patience, order); !strings.HasPrefix(got, "-1") {
							t.Errorf("%q without a keeper: %s", order, got)
						}
					}
				}
				p.want("accept 5000", "1")
				nstest.StartReady(t, nstest.Child("keeper", w.socket))
				for session := range 2 {
					eventually(t, "the next keeper is given both", func() bool {
						p.says(patience, "accept 100")
						got, _ := p.says(patience, "commit "+string(rune('0'+session))+" 18")
						return got == "0"
					})
				}
			})
		}
	}
}
