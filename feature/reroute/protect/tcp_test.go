// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// flips is the number of times a link goes down and up under a TCP stream.
const flips = 1000

// A TCP stream with GSO trains survives a thousand changes of its way without loss or corruption. Packets on the
// shorter way overtake earlier ones, so TCP retransmits some segments without need. The received segments must equal
// the sent ones.
func TestTCP(t *testing.T) {
	for name, from := range map[string]struct {
		at  func(w *world) *netns.Handle
		src string
	}{"forwarded": {func(w *world) *netns.Handle { return w.s }, addrS}, "local": {func(w *world) *netns.Handle { return w.r1 }, "fc00:1::1"}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			// The stream fits the backup from the start. Larger packets would be reported and sent again.
			w.ip(w.s, "route replace default via fd00:a::1 mtu 1436")
			w.ip(w.r1, "route replace fd00:d::/64 via fd00:12::2 mtu 1436")
			w.apply(w.path(around()))
			if lost := w.stream(from.at(w), from.src); lost != 0 {
				t.Errorf("%d segments were lost", lost)
			}
			c := w.state("core").Counts
			if c.Packets == 0 || c.Bytes/c.Packets < 2000 {
				t.Errorf("no trains of segments were rerouted: %+v", c)
			}
			w.healthy()
		})
	}
}

// Trains too long for the backup are split, so nothing waits for the sender to learn the size.
func TestTCPShrinks(t *testing.T) {
	nstest.NeedRoot(t)
	for try, shrunk := 1, false; !shrunk; try++ {
		t.Run("", func(t *testing.T) {
			w := newWorld(t)
			w.apply(w.path(around()))
			w.streamTo(w.s, addrS, addrD, 0) // the sender learns by losses
			c := w.state("core").Counts
			if c.Lost > 0 || c.Odd > 0 {
				t.Errorf("%+v", c)
			}
			// If the first packet that is too long is no train, the sender learns the size and sends no long trains.
			shrunk = c.Shrunk > 0
			if !shrunk && (c.Big == 0 || try == 5) {
				t.Fatalf("nothing was cut shorter: %+v", c)
			}
			w.healthy()
		})
		if t.Failed() {
			return
		}
	}
}

// stream sends over TCP to d while the link changes. It returns the segments lost.
func (w *world) stream(ns *netns.Handle, src string) (lost int) {
	w.Helper()
	return w.streamTo(ns, src, addrD, patience)
}

// maxAnew bounds the repetitions of a stream.
const maxAnew = 4

// streamTo is stream to another address of d, and waits late for segments. If a CPU's backlog dropped packets
// meanwhile, the loss proves nothing and the stream is repeated. If every try had such drops, their losses are not
// counted.
func (w *world) streamTo(ns *netns.Handle, src, dst string, late time.Duration) (lost int) {
	w.Helper()
	explained := false
	for range maxAnew {
		explained = false
		before := nstest.Backlog(w).Dropped
		dropped := func() uint64 { return nstest.Backlog(w).Dropped - before }
		if lost = w.streamOnce(ns, src, dst, late, dropped); lost == 0 || late == 0 || dropped() == 0 {
			break
		}
		w.Logf("%d segments were lost while the CPUs' backlogs dropped %d packets: once more", lost, dropped())
		explained = lost > 0 && uint64(lost) <= dropped()
	}
	if explained {
		return 0
	}
	return lost
}

// streamOnce sends the stream once. It waits late for missing segments unless a CPU's backlog dropped packets.
func (w *world) streamOnce(ns *netns.Handle, src, dst string, late time.Duration, dropped func() uint64) (lost int) {
	w.Helper()
	var l net.Listener
	w.in(w.d, func() (err error) {
		c := net.ListenConfig{}
		c.SetMultipathTCP(false)
		if late != 0 {
			// The window keeps the data in flight below a CPU's backlog of 1,000 packets
			// (net.core.netdev_max_backlog).
			c.Control = func(_, _ string, raw syscall.RawConn) error {
				return raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 256<<10) })
			}
		}
		l, err = c.Listen(w.Context(), "tcp", net.JoinHostPort(dst, "0"))
		return err
	})
	defer l.Close()
	got, taken := make(chan [32]byte, 1), make(chan *net.TCPConn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		taken <- c.(*net.TCPConn)
		h := sha256.New()
		_, _ = io.Copy(h, c)
		got <- [32]byte(h.Sum(nil))
	}()
	var c *net.TCPConn
	w.in(ns, func() (err error) {
		c, err = net.DialTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(src), 0)), l.Addr().(*net.TCPAddr))
		return err
	})
	defer c.Close()
	stop, sent := make(chan struct{}), make(chan [32]byte, 1)
	go func() {
		h := sha256.New()
		r := rand.NewChaCha8([32]byte{1})
		buf := make([]byte, 1<<16)
		for {
			select {
			case <-stop:
				_ = c.CloseWrite()
				sent <- [32]byte(h.Sum(nil))
				return
			default:
			}
			_, _ = r.Read(buf)
			if _, err := c.Write(buf); err != nil {
				w.Error(err)
				sent <- [32]byte{}
				return
			}
			h.Write(buf)
		}
	}()
	w.flip(flips)
	close(stop)
	want := <-sent
	select {
	case h := <-got:
		if h != want {
			w.Error("what came is not what was sent")
		}
	case <-time.After(60 * time.Second):
		w.Fatal("the stream did not end")
	}
	// Segments sent twice because of a late acknowledgement may still be in flight. Lost ones never arrive.
	to := <-taken
	defer to.Close()
	_ = nstest.Poll(late, func() error {
		out, in := info(w, c), info(w, to)
		lost = int(out.Data_segs_out) - int(in.Data_segs_in)
		if out.Unacked == 0 && (lost == 0 || dropped() > 0) {
			return nil
		}
		return errors.New("segments are under way")
	})
	return lost
}

// info returns the kernel's TCP_INFO of a connection.
func info(t testing.TB, c *net.TCPConn) (i *unix.TCPInfo) {
	raw, err := c.SyscallConn()
	if err == nil {
		_ = raw.Control(func(fd uintptr) { i, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	}
	if err != nil {
		t.Error(err)
		return &unix.TCPInfo{}
	}
	return i
}

// flip takes the link out of use and back, n times.
func (w *world) flip(n int) {
	w.Helper()
	locked(w, w.root, func(l *kernel.WriteLock) error {
		all, err := allInstances(w.root)
		if err != nil {
			return err
		}
		s, err := openInstance(l, all[0])
		if err != nil {
			return err
		}
		defer s.close()
		words, err := links.MapWords(s.pins.Maps[pinLinks])
		if err != nil {
			return err
		}
		defer words.Close()
		slot := slotOf(w, w.r1, "main")
		pace := time.NewTicker(time.Millisecond)
		defer pace.Stop()
		for i := range 2 * n {
			words.Set(slot, links.DrainByte, i%2 == 0)
			<-pace.C
		}
		return nil
	})
}
