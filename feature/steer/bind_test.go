// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

func needBindShare(t *testing.T) {
	t.Helper()
	if err := probe.BindShare.Check(); err != nil {
		t.Skip("need: kernel 6.1 (bpf_setsockopt of SO_REUSEPORT in bind hooks):", err)
	}
}

// plainBind binds a port without SO_REUSEPORT.
func plainBind(network, addr string) (interface{ Close() error }, error) {
	if strings.HasPrefix(network, "udp") {
		return net.ListenPacket(network, addr)
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return lc.Listen(context.Background(), network, addr)
}

// bindTwice reports whether a second socket can bind the same address.
func bindTwice(t testing.TB, network, addr string) bool {
	t.Helper()
	a, err := plainBind(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := plainBind(network, addr)
	if errors.Is(err, unix.EADDRINUSE) {
		return false
	} else if err != nil {
		t.Fatal(err)
	}
	b.Close()
	return true
}

func (w *world) bindThere() bool {
	o, err := w.root.Open(engine.BindInstance)
	if err != nil {
		return false
	}
	o.Close()
	return true
}

func TestSharePort(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2, SharePort: true}, "udp :9991", "tcp :9991")
	needBindShare(t)
	for _, network := range []string{"udp4", "tcp4", "udp6", "tcp6"} {
		if bindTwice(t, network, ":9991") {
			t.Fatalf("%s: two sockets on a port without share_port", network)
		}
	}
	w.apply()
	for _, network := range []string{"udp4", "tcp4", "udp6", "tcp6", "udp", "tcp"} {
		if !bindTwice(t, network, ":9991") {
			t.Errorf("%s: the port is not shared", network)
		}
		if bindTwice(t, network, ":9990") {
			t.Errorf("%s: a port of nobody's is shared", network)
		}
	}
	if got := w.state().Shared; got == nil || got.Sockets != 12 || got.Failed != 0 {
		t.Errorf("counted %+v, want 12 sockets", got)
	}
	// Ports of another namespace are not affected.
	other, err := netns.Create("weir-other")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Delete("weir-other") })
	defer other.Close()
	if err := other.Do(func() error {
		if bindTwice(t, "udp4", "127.0.0.1:9991") {
			t.Error("a port is shared in another namespace")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	// Unmodified daemons serve two slots on one port.
	a, b := startSink(t, "udp6!=:9991", "tcp6!=:9991", "udp4!=:9991", "tcp4!=:9991"), startSink(t, "udp6!=:9991", "tcp6!=:9991", "udp4!=:9991", "tcp4!=:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	w.check(sources(12), loopback4, names(a, b))
	if steps := w.apply(); len(steps) != 0 {
		t.Errorf("applied twice, it does %q", steps)
	}
	w.cfg.Services[0].SharePort = false
	if steps := w.apply(); len(steps) != 1 || !strings.Contains(steps[0], "share_port true → false") {
		t.Errorf("it does %q", steps)
	}
	if w.bindThere() {
		t.Error("the hook stays after the last service that wants it")
	}
	a.kill()
	b.kill()
	w.sharesSoon(false)
}

// TestSharePortRealDaemon uses an unmodified daemon.
func TestSharePortRealDaemon(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2, SharePort: true}, "udp4 :9991")
	needBindShare(t)
	if _, err := exec.LookPath("nfcapd"); err != nil {
		t.Skip("need: tool nfcapd (Debian package nfdump)")
	}
	w.apply()
	var pids []string
	for range 2 {
		c := exec.Command("nfcapd", "-w", t.TempDir(), "-p", "9991", "-4", "-b", "0.0.0.0")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Process.Kill(); c.Wait() })
		slot := slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: len(pids)}
		if _, err := engine.AdmitWithin(t.Context(), w.root, slot, &service.Member{PID: c.Process.Pid}, time.Minute); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, strconv.Itoa(c.Process.Pid))
	}
	for _, p := range w.where(sources(12)...) {
		if got := strconv.Itoa(p.PID); got != pids[p.Slot] {
			t.Errorf("%s goes to process %s, want %s", p.Address, got, pids[p.Slot])
		}
	}
	if got := w.state().Shared; got == nil || got.Sockets != 2 || got.Failed != 0 {
		t.Errorf("counted %+v, want 2 sockets", got)
	}
}

// TestSharePortIsMended kills a command at any step. The next command makes the hook match the services.
func TestSharePortIsMended(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1, SharePort: true}, "udp 0.0.0.0:9991")
	needBindShare(t)
	for _, wanted := range []bool{true, false} {
		for steps, done := 0, false; !done; steps++ {
			w.cfg.Services[0].SharePort = !wanted
			w.apply()
			w.cfg.Services[0].SharePort = wanted
			done = w.killedApply(steps)
			w.apply()
			if w.bindThere() != wanted {
				t.Errorf("killed after %d steps: hook there: %v, want %v", steps, w.bindThere(), wanted)
			}
			w.sharesSoon(wanted)
		}
	}
	// A removed hook is attached again.
	w.cfg.Services[0].SharePort = true
	w.apply()
	w.locked(func(l *kernel.WriteLock) error { return l.Remove(engine.BindInstance) })
	if st := w.state(); st.Problem != engine.ProblemBind {
		t.Errorf("without its hook the service's problem is %q", st.Problem)
	}
	w.apply()
	w.sharesSoon(true)
	if p := w.state().Problem; p != "" {
		t.Errorf("recovered, its problem is %q", p)
	}
}

// sharesSoon waits until the port is shared, or is not. The kernel detaches a link some time after its pin is removed.
func (w *world) sharesSoon(want bool) {
	w.t.Helper()
	nstest.Eventually(w.t, func() error {
		if bindTwice(w.t, "udp4", "0.0.0.0:9991") != want {
			return fmt.Errorf("the port is shared: %v, want %v", !want, want)
		}
		return nil
	})
}
