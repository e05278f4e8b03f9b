// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"strings"
	locks "sync" // sync is this package's own
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// heardLog records log messages.
type heardLog struct {
	testLog
	mu    locks.Mutex
	lines []string
}

func (l *heardLog) keep(msg string, a ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprint(append([]any{msg}, a...)...))
}

func (l *heardLog) Info(msg string, a ...any) { l.keep(msg, a...); l.testLog.Info(msg, a...) }
func (l *heardLog) Warn(msg string, a ...any) { l.keep(msg, a...); l.testLog.Warn(msg, a...) }

// count returns the number of lines with a text.
func (l *heardLog) count(text string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

func lookOften(t *testing.T) {
	t.Helper()
	every := fastCheckInterval
	fastCheckInterval = 50 * time.Millisecond
	t.Cleanup(func() { fastCheckInterval = every })
}

// While a check fails, packets are rerouted without the fast program and links are followed. It returns after a check
// succeeds.
func TestUnsure(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		change bool // links change meanwhile, so reconcile runs
	}{
		"interrupted": {netlink.ErrDumpInterrupted, true}, "something else": {errors.New("there is no memory"), false},
	} {
		t.Run(name, func(t *testing.T) {
			lookOften(t)
			var fails atomic.Bool
			asked := interfaces
			t.Cleanup(func() { interfaces = asked })
			interfaces = func() ([]netlink.Link, error) {
				all, err := asked()
				if fails.Load() {
					return all[:1], c.err
				}
				return all, err
			}
			w := newWorld(t)
			if !tcx() {
				t.Skip("need: kernel with tcx (6.6)")
			}
			w.apply(w.path(around()))
			log := &heardLog{testLog: testLog{w.TB}}
			w.serveTo(log)
			w.drain(true)
			p := w.pair(true)
			fast := func() bool {
				before := w.state("core").Counts
				if !p.arrives(100, patience) {
					t.Error("a packet does not arrive")
				}
				after := w.state("core").Counts
				if after.Packets == before.Packets {
					t.Error("a packet was not rerouted")
				}
				return after.Fast > before.Fast
			}
			w.until("packets are rerouted at ingress", fast)
			fails.Store(true)
			w.until("they are not any more", func() bool { return !fast() })
			if c.change {
				w.ip(w.r1, "link set in mtu 1490")
				w.ip(w.r1, "link set back mtu 1490")
			}
			nstest.Steadily(t, 20*fastCheckInterval, func() error {
				if fast() {
					return errors.New("the fast program runs where nobody can tell whether it may")
				}
				return nil
			})
			fails.Store(false)
			w.until("it is back", fast)
			if n := log.count("are not followed"); n != 0 {
				t.Errorf("links were not followed, %d times", n)
			}
			if n := log.count("after the kernel's routing"); n != 1 {
				t.Errorf("warned %d times", n)
			}
			if n := log.count("packets are rerouted at ingress interfaces"); n > 1 && !c.change {
				t.Errorf("started %d times", n)
			}
			w.healthy()
		})
	}
}

// One of several obstacles is reported, and the same one until they change.
func TestOneReason(t *testing.T) {
	lookOften(t)
	w := newWorld(t)
	if !tcx() {
		t.Skip("need: kernel with tcx (6.6)")
	}
	w.apply(w.path(around()))
	w.ip(w.r1, "route add fd00:d::/64 from fd00:a::/64 via fd00:12::2")
	p, _ := theirs(w)
	w.in(w.r1, func() error {
		all, err := dump.LinkList()
		for _, l := range all {
			if err == nil && l.Attrs().EncapType == "ether" && l.Attrs().Flags&unix.IFF_LOOPBACK == 0 {
				err = kernel.Clsact{Ifindex: l.Attrs().Index, Name: "theirs"}.Attach(p)
			}
		}
		return err
	})
	log := &heardLog{testLog: testLog{w.TB}}
	w.serveTo(log)
	w.drain(true)
	said := func() int { return log.count("packets are rerouted at ingress") }
	w.until("it stands aside", func() bool { return said() > 0 })
	time.Sleep(time.Second) // the effects of the first change are over
	before := said()
	nstest.Steadily(t, 20*fastCheckInterval, func() error {
		if n := said() - before; n > 0 || log.count("routes by source") == 0 {
			return fmt.Errorf("it changed %d times while nothing did", n)
		}
		return nil
	})
}
