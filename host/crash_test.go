// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// playApply applies a file, or removes everything, and is killed at a step, counted from 0: ROOT FILE|remove STEP.
func playApply(f []string) error {
	kerneltest.DieAt(f[2])
	if f[1] == "remove" {
		return New(f[0]).Remove(context.Background(), "", true)
	}
	c, err := LoadConfig(f[1])
	if err != nil {
		return err
	}
	return New(f[0]).Apply(context.Background(), c, func(Done) {})
}

// crash applies a file in a process killed at a step. It returns the step, or "" if there were fewer.
func (w world) crash(file string, step int) string {
	w.t.Helper()
	return kerneltest.Killed(w.t, child("apply", w.Root.Path(), file, step))
}

// handled sends one datagram to a port and returns the services that counted it. It waits for want.
func (w world) handled(port int, want string) (services string) {
	w.t.Helper()
	count := func() map[string]uint64 {
		out := map[string]uint64{}
		for _, s := range w.state().Services {
			for _, slot := range s.Slots {
				v := slot.Verdicts["udp"]
				out[s.Name] += v.Steered + v.Rejected
			}
		}
		return out
	}
	before := count()
	heard(w.t, "127.0.0.5:0", fmt.Sprintf("127.0.0.1:%d", port))
	after := count()
	_ = nstest.Poll(30*time.Second, func() error { // the caller reports a missing one
		if after = count(); want != "" && after[want] == before[want] {
			return errors.New("nothing was counted for " + want)
		}
		return nil
	})
	for name, n := range after {
		if n > before[name] {
			services += name
		}
	}
	return services
}

// After a kill at any step of a change with created, changed and removed services, the next apply finishes it:
// everything exists and works.
func TestKilledApplyIsFinishedByTheNext(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	one := w.config(`
services:
  telemetry: {listen: [udp 0.0.0.0:4739, tcp 0.0.0.0:4739], steer: {slots: 2}, members: [{slot: 0, pid: %d}]}
  goes: {listen: [udp 0.0.0.0:2055], steer: {slots: 1}}
`, pid)
	text := fmt.Sprintf(`
services:
  telemetry: {listen: [udp 0.0.0.0:4739, tcp 0.0.0.0:4739], steer: {slots: 3}, members: [{slot: 0, pid: %d}, {slot: 2, pid: %d}]}
  comes: {listen: [udp 0.0.0.0:6343], steer: {slots: 1}}
`, pid, pid)
	file := filepath.Join(t.TempDir(), "two.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	two := w.config("%s", text)
	one.AllowOutage = true // slot 2 goes, and part of its traffic moves to slot 1, without a member
	// Once the service of this port is gone, the kernel delivers its traffic again.
	plain, err := net.ListenUDP("udp4", &net.UDPAddr{Port: 2055})
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	seen := map[string]bool{}
	every := 1
	if testing.Short() { // slow machine: a quarter of the steps
		every = 4
	}
	for n := 0; ; n += every {
		w.apply(one)
		step := w.crash(file, n)
		if step == "" {
			break
		}
		seen[step] = true
		steps := w.apply(two)
		when := fmt.Sprintf("killed at step %d (%s), then %q", n, step, steps)
		w.wantTwo(when)
		plain.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := plain.Read(make([]byte, 8)); err != nil {
			t.Errorf("%s: the port of the service that went is not the kernel's own again: %v", when, err)
		}
		before := w.dump()
		wantSteps(t, w.apply(two))
		same(t, "applying once more", before, w.dump())
	}
	for _, s := range []string{"publish:staged", "publish:renamed", "steer:published", "steer:port", "steer:changing", "steer:admitted", "remove:retired", "steer:removed"} {
		if !seen[s] && every == 1 {
			t.Errorf("was never killed at %s, but at %v", s, seen)
		}
	}
}

func (w world) wantTwo(when string) {
	w.t.Helper()
	st := w.state()
	if len(st.Services) != 2 || st.Services[0].Name != "comes" || st.Services[1].Name != "telemetry" {
		w.t.Errorf("%s: services %+v", when, st.Services)
		return
	}
	slots := st.Services[1].Slots
	if len(slots) != 3 || !slots[0].Admitted() || slots[1].Admitted() || st.Services[0].Problem+st.Services[1].Problem != "" {
		w.t.Errorf("%s: telemetry is %+v", when, st.Services[1])
	}
	for port, want := range map[int]string{4739: "telemetry", 6343: "comes", 2055: ""} {
		if got := w.handled(port, want); got != want {
			w.t.Errorf("%s: port %d is counted by %q, want %q", when, port, got, want)
		}
	}
}
