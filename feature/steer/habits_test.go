// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Habits of real daemons, one at a time. A well-behaved neighbour must not notice.

var bothProtocols = []string{"udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"}

// newPair returns a service of two slots, served by a daemon with a habit and its neighbour.
func newPair(t *testing.T) (w *world, strange, neighbour *sink) {
	w = newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	strange, neighbour = startSink(t, bothProtocols...), startSink(t, bothProtocols...)
	w.member(0, strange)
	w.member(1, neighbour)
	return w, strange, neighbour
}

// TestSlowStopper stops a daemon slowly: it closes UDP first. From then on it gets no TCP either, and no other member
// gets its traffic.
func TestSlowStopper(t *testing.T) {
	eachEngine(t, func(t *testing.T) {
		w, slow, neighbour := newPair(t)
		w.apply()
		w.check(sources(12), loopback4, names(slow, neighbour))
		slow.do("term 1h") // closes UDP, then stays busy
		slow.Signal(syscall.SIGTERM)
		deadline(t, func() bool { return !w.state().Slots[0].Admitted() })
		w.check(sources(12), loopback4, names(nil, neighbour))
		if r := w.state().Slots[0].Reason; !strings.Contains(r, "closed udp") {
			t.Errorf("reason of the empty slot: %q", r)
		}
		slow.kill()
		w.check(sources(12), loopback4, names(nil, neighbour))
	})
}

// TestStoppedProcess: a stopped process keeps its slot. Its sockets are open, so its traffic queues as without weir,
// and no other member gets it.
func TestStoppedProcess(t *testing.T) {
	eachEngine(t, func(t *testing.T) {
		w, stopped, neighbour := newPair(t)
		w.apply()
		w.serve()
		freeze(t, stopped.pid())
		var theirs, others = w.bySlot(12)
		answers := make(chan string, 2*len(theirs))
		for _, a := range theirs {
			for _, proto := range slots.Protocols {
				go func() { // each waits in the stopped member's queues
					got, err := askPatiently(proto, a, loopback4, patiently, patiently, func() bool { return false })
					if err != nil {
						got = err.Error()
					}
					answers <- got
				}()
			}
		}
		deadline(t, func() bool { return w.queued(0) >= len(theirs) })
		w.check(others, loopback4, names(nil, neighbour))
		if s := w.state().Slots[0]; !s.Admitted() || s.PID != stopped.pid() {
			t.Errorf("the slot of a stopped process: %+v", s)
		}
		stopped.Signal(syscall.SIGCONT)
		for range 2 * len(theirs) {
			if got := <-answers; got != fmt.Sprint(stopped.pid()) {
				t.Errorf("once it goes on, a request that waited is answered by %s, want %d", got, stopped.pid())
			}
		}
	})
}

// bySlot returns the sources of slot 0, and the others.
func (w *world) bySlot(n int) (first, others []netip.Addr) {
	for _, p := range w.where(sources(n)...) {
		if p.Slot == 0 {
			first = append(first, p.Address)
		} else {
			others = append(others, p.Address)
		}
	}
	return first, others
}

// queued returns the number of connections in a slot's listener queue, or 0 while its UDP socket is empty.
func (w *world) queued(slot int) int {
	tcp, udp := 0, 0
	for _, s := range w.state().Slots[slot].Sockets {
		if strings.HasPrefix(s.Listen, "tcp") {
			tcp += int(s.Queue)
		} else {
			udp += int(s.Queue)
		}
	}
	if udp == 0 {
		return 0
	}
	return tcp
}

// TestZombie: a slot is withdrawn when its process exits, before the parent waits for it. The zombie's PID, still in
// /proc, cannot be admitted.
func TestZombie(t *testing.T) {
	eachEngine(t, func(t *testing.T) {
		w, zombie, neighbour := newPair(t)
		w.apply()
		w.check(sources(8), loopback4, names(zombie, neighbour))
		if err := zombie.Process.Process.Kill(); err != nil { // without a wait by the parent
			t.Fatal(err)
		}
		p, err := pidfd.Open(zombie.pid())
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		deadline(t, func() bool { return !p.Alive() })
		w.check(sources(8), loopback4, names(nil, neighbour))
		w.locked(func(l *kernel.WriteLock) error {
			at := slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: 0}
			if _, err := engine.AdmitLocked(t.Context(), l, at, nil, nil); !errors.Is(err, service.ErrNotRunning) {
				t.Errorf("registering a zombie: %v", err)
			}
			return nil
		})
		next := startSink(t, bothProtocols...)
		w.member(0, next)
		w.apply()
		w.check(sources(8), loopback4, names(next, neighbour))
	})
}

// TestReopensOnHangup: a daemon that reopens its sockets on SIGHUP is withdrawn meanwhile and admitted again.
func TestReopensOnHangup(t *testing.T) {
	eachEngine(t, func(t *testing.T) {
		w, reopens, neighbour := newPair(t)
		w.apply()
		w.serve()
		reopens.do("hup 200ms")
		before, out := w.state().Slots[0].Cookies(), 0
		for range 3 {
			reopens.Signal(syscall.SIGHUP)
			deadline(t, func() bool {
				slot := w.state().Slots[0]
				if !slot.Admitted() {
					out++
					return true
				}
				return !maps.Equal(slot.Cookies(), before) // it was withdrawn while the test stalled
			})
			_, others := w.bySlot(12)
			w.check(others, loopback4, names(nil, neighbour))
			w.admitted(0, reopens.pid())
			w.check(sources(12), loopback4, names(reopens, neighbour))
			after := w.state().Slots[0].Cookies()
			if maps.Equal(after, before) {
				t.Errorf("the sockets are the old ones: %v", after)
			}
			before = after
		}
		if out == 0 {
			t.Error("it was never out")
		}
	})
}

// TestDaemonize: a forked daemon whose parent exits is found by its pidfile or cgroup. By cgroup the parent may get the
// slot first.
func TestDaemonize(t *testing.T) {
	eachEngine(t, func(t *testing.T) {
		for _, how := range []string{"pidfile", "cgroup"} {
			t.Run(how, func(t *testing.T) {
				w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
				neighbour := startSink(t, bothProtocols...)
				w.member(1, neighbour)
				file := t.TempDir() + "/pid"
				m := service.Member{Slot: 0, PIDFile: file}
				if how == "cgroup" {
					m = service.Member{Slot: 0, Cgroup: newCgroup(t)}
				}
				w.cfg.Services[0].Members = append(w.cfg.Services[0].Members, m)
				w.apply()
				w.serve()
				parent := startSink(t)
				if how == "cgroup" {
					moveTo(t, m.Cgroup, parent.pid())
				}
				for _, s := range bothProtocols {
					parent.do("open " + s)
				}
				if how == "cgroup" {
					w.admitted(0, parent.pid())
				}
				parent.Tell("daemonize " + file)
				pid := readPID(t, file)
				deadline(t, func() bool { return !slots.Running(parent.pid()) }) // until then it may answer too
				took := w.admitted(0, pid)
				t.Logf("admitted %s after it was there", took)
				daemon := func(p state.Assignment) string { return fmt.Sprint([]int{pid, neighbour.pid()}[p.Slot]) }
				w.check(sources(12), loopback4, daemon)
			})
		}
	})
}

// readPID waits for a pidfile.
func readPID(t *testing.T, file string) (pid int) {
	t.Helper()
	deadline(t, func() bool {
		text, err := os.ReadFile(file)
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(string(text))
		return err == nil
	})
	t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	return pid
}

// newCgroup creates a cgroup and ends its processes with the test.
func newCgroup(t *testing.T) string {
	t.Helper()
	root, err := units.CgroupRoot()
	if err != nil {
		t.Skip("need: kernel with a cgroup2 mount:", err)
	}
	name := fmt.Sprintf("/weir-steer-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "_"))
	if err := os.Mkdir(root+name, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pids, _ := units.CgroupProcs(name)
		for _, p := range pids {
			unix.Kill(p, unix.SIGKILL)
		}
		deadline(t, func() bool { return unix.Rmdir(root+name) == nil })
	})
	return name
}

func moveTo(t *testing.T, cgroup string, pid int) {
	t.Helper()
	root, err := units.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+cgroup+"/cgroup.procs", fmt.Append(nil, pid), 0); err != nil {
		t.Fatal(err)
	}
}
