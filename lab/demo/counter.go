// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/lab"
	"golang.org/x/sys/unix"
)

// counterArg runs the lab's own binary as a server of sessions; see Play.
const counterArg = "__demo-counter"

// Play handles "weir-lab __demo-counter ADDRESS KEEPER": it turns the process into a server. The server
// answers each byte with the number of bytes in this connection. main calls Play first. It returns if the
// process is no such child.
func Play() {
	if len(os.Args) != 4 || os.Args[1] != counterArg {
		return
	}
	fmt.Fprintln(os.Stderr, "counter:", count(os.Args[2], os.Args[3]))
	os.Exit(0)
}

// count serves until a newer process has everything.
func count(address, keeper string) error {
	l, err := handoff.Listen(context.Background(), "tcp", address, handoff.Options{Service: "count", Name: "0", Keeper: keeper, Orphans: true})
	if err != nil {
		return err
	}
	for {
		s, err := l.AcceptSession() // a new connection, or one of another process
		if err != nil {
			return err
		}
		go countSession(s)
	}
}

// countSession answers until the session ends or moves. Its state is the count.
func countSession(s *handoff.Session) {
	var n uint64
	if b := s.State(); len(b) == 8 {
		n = binary.BigEndian.Uint64(b)
	}
	b := make([]byte, 64)
	for {
		got, err := s.Read(b)
		if errors.Is(err, io.EOF) {
			s.Close()
		}
		if err != nil {
			return
		}
		var answers, state []byte
		for range got {
			n++
			answers = binary.BigEndian.AppendUint64(answers, n)
		}
		if _, err := s.Write(answers); err != nil {
			return
		}
		if s.Commit(binary.BigEndian.AppendUint64(state, n)) != nil {
			return
		}
	}
}

// dialKeeper reports whether the session keeper of the host answers.
func dialKeeper(h *Host) error {
	c, err := net.Dial("unixpacket", h.keeper())
	if err == nil {
		c.Close()
	}
	return err
}

// established counts the connections to a port in the kernel of the host.
func established(h *Host, port uint16) (n int) {
	_ = h.Do(func() error {
		sockets, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << unix.BPF_TCP_ESTABLISHED, LocalPort: port})
		n = len(sockets)
		return err
	})
	return n
}

// startCounter starts the server on the host.
func (h *Host) startCounter(name, address string) (*lab.Process, error) {
	return h.Daemon(name, h.stage.Self(), counterArg, address, h.keeper())
}

// talkers are clients with a connection each. They ask several times a second and check every answer.
type talkers struct {
	mu      sync.Mutex
	all     []*talker
	answers int
	wrong   int
	longest time.Duration // between a question and its answer
}

type talker struct {
	conn net.Conn
	n    uint64
	err  error
}

// interval is the time between two questions of a client.
const interval = 50 * time.Millisecond

// open connects n clients of a namespace. They talk until the demonstration ends.
func (t *talkers) open(ctx context.Context, s *Stage, ns *netns.Handle, address string, n int) error {
	ctx, cancel := context.WithCancel(ctx)
	s.OnClose(cancel)
	for range n {
		c := &talker{}
		err := ns.Do(func() (err error) { c.conn, err = net.DialTimeout("tcp", address, 5*time.Second); return err })
		if err != nil {
			return err
		}
		s.OnClose(func() { c.conn.Close() })
		t.mu.Lock()
		t.all = append(t.all, c)
		t.mu.Unlock()
		go t.talk(ctx, c)
	}
	return nil
}

func (t *talkers) talk(ctx context.Context, c *talker) {
	b := make([]byte, 8)
	for pause(ctx, interval) == nil {
		asked := time.Now()
		_ = c.conn.SetDeadline(asked.Add(patience))
		_, err := c.conn.Write([]byte{'?'})
		if err == nil {
			_, err = io.ReadFull(c.conn, b)
		}
		if ctx.Err() != nil {
			return
		}
		t.mu.Lock()
		if c.err = err; err == nil {
			t.answers++
			t.longest = max(t.longest, time.Since(asked))
			if c.n++; binary.BigEndian.Uint64(b) != c.n {
				t.wrong++
			}
		}
		t.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// counts returns the number of connections, of ended ones, of answers and of wrong answers.
func (t *talkers) counts() (all, ended, answers, wrong int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.all {
		if c.err != nil {
			ended++
		}
	}
	return len(t.all), ended, t.answers, t.wrong
}

// slowest returns the longest time of an answer since the last call.
func (t *talkers) slowest() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.longest
	t.longest = 0
	return d
}

// round waits until every living connection has some more answers.
func (t *talkers) round(ctx context.Context) error {
	t.mu.Lock()
	var begin []uint64
	for _, c := range t.all {
		begin = append(begin, c.n)
	}
	t.mu.Unlock()
	return within(ctx, patience, "every connection goes on", func() error {
		t.mu.Lock()
		defer t.mu.Unlock()
		for i, c := range t.all {
			if c.err == nil && c.n < begin[i]+3 {
				return fmt.Errorf("connection %d of %d waits", i, len(t.all))
			}
		}
		return nil
	})
}
