// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"member": playMember, "keeper": playKeeper, "careless": playCareless, "stranger": playStranger, "packets": playPackets, "broken": playBroken, "echo": playEcho})
	nstest.Main(m)
}

// patience is the timeout for expected events. It exceeds any stall of the machine.
const patience = 30 * time.Second

// The protocol of the members in these tests. The client sends messages of 7 bytes. The server
// answers each with 8 bytes: the hash of all messages so far. So an answer is right only if no
// earlier byte was lost, doubled or changed in either direction, by any server.
const (
	question = 7
	answer   = 8
)

// talk is the state of one stream, as committed by a member.
type talk struct {
	hash  uint64
	count uint64
}

func newTalk(state []byte) talk {
	if len(state) < 16 {
		return talk{hash: 14695981039346656037}
	}
	return talk{binary.LittleEndian.Uint64(state), binary.LittleEndian.Uint64(state[8:])}
}

func (k *talk) state(padding int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, k.hash)
	return append(binary.LittleEndian.AppendUint64(b, k.count), make([]byte, padding)...)
}

// next consumes the whole messages of b. It returns the answers and the number of remaining bytes.
func (k *talk) next(b []byte) (answers []byte, rest int) {
	for ; len(b) >= question; b = b[question:] {
		h := fnv.New64a()
		binary.Write(h, binary.LittleEndian, k.hash)
		h.Write(b[:question])
		k.hash = h.Sum64()
		k.count++
		answers = binary.LittleEndian.AppendUint64(answers, k.hash)
	}
	return answers, len(b)
}

// serve answers a session until it ends or moves. It commits only at times, so a crash leaves work
// to repeat.
func serve(s *handoff.Session, padding int) error {
	k := newTalk(s.State())
	if read, written := s.Positions(); read != k.count*question || written != k.count*answer {
		return fmt.Errorf("session stands at read %d, written %d; its state at message %d", read, written, k.count)
	}
	var partial []byte
	buf := make([]byte, 3000)
	for {
		n, err := s.Read(buf)
		if err == io.EOF {
			return s.Close()
		}
		if err != nil {
			return err
		}
		partial = append(partial, buf[:n]...)
		answers, rest := k.next(partial)
		if _, err := s.Write(answers); err != nil {
			return err
		}
		partial = append([]byte(nil), partial[len(partial)-rest:]...)
		if rand.IntN(3) > 0 {
			if err := s.CommitExcept(rest, k.state(padding)); err != nil {
				return err
			}
		}
	}
}

// playMember serves a service until its standard input ends:
// KEEPER SERVICE NAME ADDRESS PADDING [orphans] [stay].
func playMember(args []string) error {
	o := handoff.Options{Keeper: args[0], Service: args[1], Name: args[2], Timeout: patience, Proof: 20 * time.Millisecond, Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
	padding := 0
	fmt.Sscan(args[4], &padding)
	for _, a := range args[5:] {
		o.Orphans = o.Orphans || a == "orphans"
		o.Stay = o.Stay || a == "stay"
		if a == "proof" {
			o.Proof = 0
		}
		if a == "poor" {
			if err := fewFiles(); err != nil {
				return err
			}
		}
	}
	l, err := handoff.Listen(context.Background(), "tcp", args[3], o)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	go func() {
		for {
			s, err := l.AcceptSession()
			if err != nil {
				fmt.Println("stopped:", errors.Is(err, handoff.ErrReplaced))
				return
			}
			go func() {
				err := serve(s, padding)
				if err != nil && !errors.Is(err, handoff.ErrMoved) {
					fmt.Fprintln(os.Stderr, "member:", err)
				}
			}()
		}
	}()
	// A line is an order: "move NAME" moves each session by itself, "over NAME" hands over
	// everything.
	var what, to string
	for {
		if _, err := fmt.Scanln(&what, &to); err != nil {
			return nil
		}
		var err error
		if what == "over" {
			err = l.Member().HandOver(to)
		} else {
			for _, s := range l.Member().Sessions() {
				err = errors.Join(err, l.Member().TransferCommitted(s, to))
			}
		}
		fmt.Println(what, "done:", err)
	}
}

// playKeeper keeps until its standard input ends: SOCKET.
func playKeeper(args []string) error {
	l, err := keeper.Listen(args[0])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { io.Copy(io.Discard, os.Stdin); cancel() }()
	fmt.Println("ready")
	return keeper.New(keeper.Options{}).Serve(ctx, l)
}

// world is a keeper in this process with members in their own processes.
type world struct {
	t       testing.TB
	socket  string
	keeper  *keeper.Keeper
	address string
	proof   []string // argument of the servers in C and Python, unless default
}

func newWorld(t testing.TB, o keeper.Options) *world {
	t.Helper()
	nstest.NeedRoot(t)
	w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(testWriter{t}, nil))
	}
	w.keeper = keeper.New(o)
	l, err := keeper.Listen(w.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.keeper.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

// testWriter prints the keeper's log in verbose tests.
type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	if testing.Verbose() {
		os.Stderr.Write(b)
	}
	return len(b), nil
}

// freeAddress returns an unused address on lo.
func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (w *world) member(name string, more ...any) *nstest.Process {
	w.t.Helper()
	return w.memberAt(w.address, name, more...)
}

func (w *world) memberAt(address, name string, more ...any) *nstest.Process {
	w.t.Helper()
	return nstest.StartReady(w.t, nstest.Child("member", append([]any{w.socket, "talk", name, address}, more...)...))
}

// client is one stream. It asks as fast as it gets answers and checks them.
type client struct {
	t      testing.TB
	conn   *net.TCPConn
	asks   chan int // messages not yet answered
	stop   chan struct{}
	ended  chan error
	count  atomic.Int64 // messages answered
	urgent bool         // the last byte of some pieces is urgent
	pause  time.Duration
}

func (w *world) client() *client {
	w.t.Helper()
	conn, err := net.Dial("tcp", w.address)
	if err != nil {
		w.t.Fatal(err)
	}
	c := &client{t: w.t, conn: conn.(*net.TCPConn), asks: make(chan int, 1000), stop: make(chan struct{}), ended: make(chan error, 1)}
	w.t.Cleanup(func() { conn.Close() })
	return c
}

func (c *client) run() {
	hashes := make(chan uint64, 1<<16)
	go c.ask(hashes)
	go func() { c.ended <- c.check(hashes) }()
}

// ask sends questions in pieces of any size until stop, then closes its half.
func (c *client) ask(hashes chan<- uint64) {
	defer close(hashes)
	k := newTalk(nil)
	r := rand.New(rand.NewPCG(1, 2))
	var unsent []byte
	for {
		select {
		case <-c.stop:
			c.conn.Write(unsent)
			c.conn.CloseWrite()
			return
		default:
		}
		for len(unsent) < 2000 {
			q := make([]byte, question)
			binary.LittleEndian.PutUint32(q, r.Uint32())
			copy(q[4:], "abc")
			k.next(q)
			hashes <- k.hash
			unsent = append(unsent, q...)
		}
		n := 1 + r.IntN(len(unsent))
		if c.urgent && r.IntN(2) == 0 {
			if err := sendUrgent(c.conn, unsent[:n]); err != nil {
				return
			}
		} else if _, err := c.conn.Write(unsent[:n]); err != nil {
			return
		}
		unsent = unsent[n:]
		time.Sleep(c.pause)
	}
}

// check reads answers to the end, which must follow the last one.
func (c *client) check(hashes <-chan uint64) error {
	b := make([]byte, answer)
	for want := range hashes {
		c.conn.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(c.conn, b); err != nil {
			return fmt.Errorf("after %d answers: %w", c.count.Load(), err)
		}
		if got := binary.LittleEndian.Uint64(b); got != want {
			return fmt.Errorf("answer %d is %x, want %x: bytes were lost, doubled or changed", c.count.Load(), got, want)
		}
		c.count.Add(1)
	}
	if n, err := c.conn.Read(b); err != io.EOF {
		return fmt.Errorf("after the last answer: %d bytes, %v; want the end", n, err)
	}
	return nil
}

// hears waits for more answers.
func (c *client) hears(more int64) {
	c.t.Helper()
	before := c.count.Load()
	nstest.Eventually(c.t, func() error {
		if n := c.count.Load() - before; n < more {
			return fmt.Errorf("%d answers came, want %d", n, more)
		}
		return nil
	})
}

// finish stops asking and waits for the remaining answers.
func (c *client) finish() {
	c.t.Helper()
	close(c.stop)
	if err := <-c.ended; err != nil {
		c.t.Error(err)
	}
}

func (w *world) counts() keeper.Counts {
	for _, s := range w.keeper.Report().Services {
		if s.Name == "talk" {
			return s.Counts
		}
	}
	return keeper.Counts{}
}

func (w *world) sessions(kind string) (out []keeper.Session) {
	for _, s := range w.keeper.Report().Services {
		for _, x := range s.Sessions {
			if x.Kind == kind {
				out = append(out, x)
			}
		}
	}
	return out
}
