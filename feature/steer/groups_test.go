// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel/kerneltest"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// grouped returns a service of engine sk_reuseport.
func grouped(t *testing.T, o spec.Options) *world {
	o.Engine = spec.EngineReuseport
	return newWorld(t, o, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
}

// theHolder returns the socket holder of the test's namespace.
func theHolder(t *testing.T, w *world) int {
	t.Helper()
	var h engine.SocketHolderProcess
	w.locked(func(l *kernel.WriteLock) error {
		o, err := l.Open(record.EngineInstance(w.state().PinScope, spec.EngineReuseport), "holder")
		if err != nil {
			return err
		}
		defer o.Close()
		return o.Maps["holder"].Lookup(uint32(0), &h)
	})
	return int(h.PID)
}

func findings(t *testing.T, w *world) string {
	t.Helper()
	all, err := examine(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(all)
}

// TestHolderFollowsAnotherListen: a service with an additional listen keeps its holder. The holder moves its sockets to
// their new indexes.
func TestHolderFollowsAnotherListen(t *testing.T) {
	w := grouped(t, spec.Options{Slots: 1})
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991", "udp4=0.0.0.0:9992")
	w.member(0, a)
	w.apply()
	was := theHolder(t, w)
	w.cfg.Services[0].Listen = append(w.cfg.Services[0].Listen, mustListen(t, "udp 0.0.0.0:9992"))
	w.apply()
	if now := theHolder(t, w); now != was {
		t.Errorf("the holder was process %d, and is %d", was, now)
	}
	if s := w.state().Slots[0]; !s.Admitted() {
		t.Errorf("the slot is %+v", s)
	}
}

// TestHolderKilled kills the holder. Running members are not affected, status reports it, and apply restarts it.
func TestHolderKilled(t *testing.T) {
	w := grouped(t, spec.Options{Slots: 2})
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	first := theHolder(t, w)
	syscall.Kill(first, syscall.SIGKILL)
	nstest.Until(t, "the loss is noticed", func() bool { return w.state().Problem == state.ProblemSocketHolder })
	w.check(sources(20), loopback4, names(a, b))
	w.apply()
	if second := theHolder(t, w); second == first || w.state().Problem != "" {
		t.Errorf("the holder was %d and is %d; problem %q", first, second, w.state().Problem)
	}
	a.kill()
	b.kill()
	a = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.check(sources(20), loopback4, names(nil, nil)) // the group and its program still exist
	w.member(0, a)
	w.apply()
	w.check(sources(20), loopback4, names(a, nil))
}

// TestHolderOfUnreadableEngine: a holder stays while its engine is unreadable.
func TestHolderOfUnreadableEngine(t *testing.T) {
	w := grouped(t, spec.Options{Slots: 1, OnEmpty: spec.Drop})
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	pid, i := theHolder(t, w), record.EngineInstance(w.state().PinScope, spec.EngineReuseport)
	p, err := pidfd.Open(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	stays := func() {
		t.Helper()
		if err := syscall.Kill(pid, syscall.SIGHUP); err != nil { // triggers a check at once, instead of every 5 s
			t.Fatal(err)
		}
		nstest.Steadily(t, time.Second, func() error {
			if !p.Alive() {
				return errors.New("the holder has ended")
			}
			return nil
		})
	}
	back := w.unpin(i, "map_holder")
	stays()
	back()
	w.newerABI(i, 1)
	stays()
	w.newerABI(i, ^uint32(0))
	stays()
	if got := w.state().Problem; got != "" {
		t.Error(got)
	}
}

// unpin removes the pin of a map; back pins it again.
func (w *world) unpin(i kernel.Instance, pin string) (back func()) {
	w.t.Helper()
	path := filepath.Join(w.root.Path(), i.Scope, i.Feature, i.Name, pin)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		err = m.Unpin() // allows m to be pinned there again
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return func() {
		defer m.Close()
		if err := m.Pin(path); err != nil {
			w.t.Fatal(err)
		}
	}
}

// TestGroupsLeaveNothing removes the last service: the holder exits and the kernel chooses.
func TestGroupsLeaveNothing(t *testing.T) {
	w := grouped(t, spec.Options{Slots: 1})
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	holder := theHolder(t, w)
	w.cfg.Services = nil
	w.apply()
	nstest.Until(t, "the holder ends", func() bool { return syscall.Kill(holder, 0) != nil })
	for _, proto := range slots.Protocols {
		if got := ask(t, proto, sources(1)[0], loopback4); got != fmt.Sprint(a.pid()) {
			t.Errorf("%s is answered by %s", proto, got)
		}
	}
	needGroupPrograms(t)
	programs, err := engine.ProgramsOfGroups()
	if err != nil || len(programs) != 0 {
		t.Errorf("programs left in groups: %v, %v", programs, err)
	}
}

func needGroupPrograms(t *testing.T) {
	t.Helper()
	if err := engine.GroupPrograms.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
}

// TestNotShared checks the reason for a daemon that does not share its port: it cannot join a group.
func TestNotShared(t *testing.T) {
	w := grouped(t, spec.Options{Slots: 1})
	w.member(0, startSink(t, "udp4!=0.0.0.0:9991", "tcp4!=0.0.0.0:9991"))
	if steps := fmt.Sprint(w.apply()); !strings.Contains(steps, "create") {
		t.Errorf("plan %s", steps)
	}
	_, err := registerNow(w, 0)
	if err == nil || !strings.Contains(err.Error(), "SO_REUSEPORT") || !strings.Contains(err.Error(), "sk_lookup") {
		t.Errorf("error %v", err)
	}
}

func registerNow(w *world, slot int) (changed bool, err error) {
	w.locked(func(l *kernel.WriteLock) error {
		changed, err = engine.AdmitLocked(w.t.Context(), l, slots.Slot{Scope: w.state().PinScope, Service: "svc", Slot: slot}, nil, nil)
		return nil
	})
	return changed, err
}

// TestMembersAlike rejects members with differently bound sockets. Each would get a part of the traffic.
func TestMembersAlike(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2, Engine: spec.EngineReuseport}, "udp :9991")
	w.member(0, startSink(t, "udp4=0.0.0.0:9991", "udp6=[::]:9991"))
	w.member(1, startSink(t, "udp=[::]:9991"))
	w.apply()
	if s := w.state(); !s.Slots[0].Admitted() || s.Slots[1].Admitted() {
		t.Fatalf("slots %+v", s.Slots)
	}
	if _, err := registerNow(w, 1); err == nil || !strings.Contains(err.Error(), "give all members the same addresses") {
		t.Errorf("error %v", err)
	}
}

// foreign attaches a foreign program to a sink's UDP group.
func foreign(t *testing.T) {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "balancer", Type: ebpf.SkReuseport, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	socks, err := engine.Bound(unix.IPPROTO_UDP, 9991)
	if err != nil || len(socks) == 0 {
		t.Fatal("no socket", err)
	}
	fd, err := service.DupSocket(socks[0])
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := (hook.ReuseportGroup{FD: fd, Name: "the sink"}).Attach(prog); err != nil {
		t.Fatal(err)
	}
}

func TestForeignProgram(t *testing.T) {
	needGroupPrograms(t)
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	foreign(t)
	w := grouped(t, spec.Options{Slots: 1})
	w.member(0, a)
	w.apply()
	if _, err := registerNow(w, 0); err == nil || !strings.Contains(err.Error(), "balancer") || !strings.Contains(err.Error(), "foreign: replace") {
		t.Errorf("error %v", err)
	}
	if s := w.state(); s.Slots[0].Admitted() {
		t.Error("admitted beside a foreign program")
	}
	w.cfg.Services[0].Foreign = spec.ForeignReplace
	w.apply()
	if !w.state().Slots[0].Admitted() {
		t.Error("not admitted though it may be replaced")
	}
	w.check(sources(10), loopback4, names(a))
	if text := findings(t, w); strings.Contains(text, "not weir's program") {
		t.Errorf("findings %s", text)
	}
	foreign(t) // again, without weir's knowledge
	if text := findings(t, w); !strings.Contains(text, "not weir's program") {
		t.Errorf("findings %s", text)
	}
}

// TestMoreSpecificBind checks doctor's warning about a socket at one address, because it bypasses the group.
func TestMoreSpecificBind(t *testing.T) {
	w := grouped(t, spec.Options{Slots: 1})
	w.member(0, startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"))
	w.apply()
	if text := findings(t, w); strings.Contains(text, "more specifically") {
		t.Errorf("findings %s", text)
	}
	startSink(t, "udp4=127.0.0.1:9991")
	if text := findings(t, w); !strings.Contains(text, "udp 127.0.0.1:9991 is bound more specifically than udp 0.0.0.0:9991") {
		t.Errorf("findings %s", text)
	}
}

// TestHolderOfAnotherUser: the holder's sockets belong to the members' user. Otherwise they would form another group
// and block the members' port.
func TestHolderOfAnotherUser(t *testing.T) {
	const nobody = 65534
	w := grouped(t, spec.Options{Slots: 1})
	a := startSinkAs(t, nobody, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	socks, err := engine.Bound(unix.IPPROTO_UDP, 9991)
	if err != nil || len(socks) != 2 {
		t.Fatalf("%d sockets, %v", len(socks), err)
	}
	for _, s := range socks {
		if s.UID != nobody {
			t.Errorf("a socket of user %d", s.UID)
		}
	}
	a.kill()
	a = startSinkAs(t, nobody, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.check(sources(4), loopback4, names(nil))
	w.member(0, a)
	w.apply()
	w.check(sources(4), loopback4, names(a))
}

// TestQueueDoesNotMigrate: connections in a dead member's queue move to another member only on request, regardless of
// the sysctl.
func TestQueueDoesNotMigrate(t *testing.T) {
	nstest.NeedRoot(t)
	for _, migrate := range []bool{false, true} {
		t.Run(fmt.Sprint(migrate), func(t *testing.T) {
			needMigration(t)
			w := grouped(t, spec.Options{Slots: 2, Migrate: migrate})
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			w.member(0, a)
			w.member(1, b)
			w.apply()
			ofA := w.sourceOf(0)
			freeze(t, a.pid()) // it accepts no more connections
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: ofA.AsSlice()}, Timeout: patience}
			d.SetMultipathTCP(false)
			c, err := d.Dial("tcp", loopback4.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			a.kill()
			c.SetReadDeadline(time.Now().Add(patience))
			buf := make([]byte, 64)
			n, err := c.Read(buf)
			if got := string(buf[:n]); migrate && got != fmt.Sprint(b.pid()) {
				t.Errorf("answered %q, %v; want the other member", got, err)
			} else if !migrate && err == nil {
				t.Errorf("answered %q, a is %d, b %d; want a reset", got, a.pid(), b.pid())
			}
		})
	}
}

// needMigration enables the migration of queues; the kernel must support it.
func needMigration(t *testing.T) {
	t.Helper()
	if v, err := kerneltest.Release(); err != nil || v[0] < 5 || v[0] == 5 && v[1] < 14 {
		t.Skip("need: kernel 5.14 (tcp_migrate_req)")
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/tcp_migrate_req", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
}

// sourceOf returns a source address of a slot.
func (w *world) sourceOf(slot int) (a netip.Addr) {
	w.t.Helper()
	for _, p := range w.where(sources(100)...) {
		if p.Slot == slot {
			return p.Address
		}
	}
	w.t.Fatalf("no source of slot %d", slot)
	return a
}

// freeze stops every thread of a process and waits for it. kill(2) returns earlier, and a running thread may still
// accept.
func freeze(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "every thread stopped", func() bool {
		stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, f := range stats {
			b, err := os.ReadFile(f)
			if err == nil && !strings.Contains(string(b), ") T ") {
				return false
			}
		}
		return len(stats) > 0
	})
}
