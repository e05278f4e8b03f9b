// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
)

// play runs a role with a file in a separate process and a namespace, until the test ends or stop is called.
func (w *world) play(ns *netns.Handle, role, text string) (stop func()) {
	w.t.Helper()
	file := filepath.Join(w.t.TempDir(), role+".yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	c := nstest.Child(role, w.root.Path(), file)
	c.Stderr = testWriter{w.t}
	in, err := c.StdinPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	w.in(ns, c.Start)
	stop = sync.OnceFunc(func() {
		in.Close()
		if err := c.Wait(); err != nil {
			w.t.Errorf("%s: %v", role, err)
		}
	})
	w.t.Cleanup(stop)
	return stop
}

// untilStdinEnds returns the context of a role: it ends with stdin.
func untilStdinEnds() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return ctx
}

func playLB(args []string) error {
	text, err := os.ReadFile(args[1])
	if err != nil {
		return err
	}
	c := &lb.Config{Name: lb.Name}
	if err := errors.Join(strictyaml.Decode(args[1], text, c), errors.Join(c.Validate()...)); err != nil {
		return err
	}
	return lb.Run(untilStdinEnds(), kernel.OpenRoot(args[0]), c, slog.New(slog.NewTextHandler(os.Stderr, nil)))
}

func playBackend(args []string) error {
	text, err := os.ReadFile(args[1])
	if err != nil {
		return err
	}
	c, err := parseConfig(args[1], text)
	if err != nil {
		return err
	}
	return start(untilStdinEnds(), kernel.OpenRoot(args[0]), c, slog.New(slog.NewTextHandler(os.Stderr, nil)))
}

// TestDrain registers backends, which learn of each other and of the services. A drain empties one, and no new
// session arrives there.
func TestDrain(t *testing.T) {
	w := newNetwork(t, 3, at4)
	cert, key, signers := w.ca.Files("lb")
	stopLB := w.play(w.middle, "lb", fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1, s2, s3]
register: true
buffer_timeout: 20s
services:
  talk: {number: 3, listen: [tcp %s]}
`, cert, key, signers, w.at))
	for i, s := range w.servers {
		s.keep()
		w.playBackend(i, s)
		s.serve()
	}
	status := func(s *server) Status { return s.status() }
	w.eventually("each server knows the two others", func() bool {
		for _, s := range w.servers {
			st := status(s)
			if !st.LB || !st.Keeper || len(st.Peers) != 2 {
				return false
			}
			for _, there := range st.Peers {
				if !there {
					return false
				}
			}
		}
		return true
	})
	drain := func(name string, again bool, progress func(Drained)) (err error) {
		w.in(w.servers[0].ns, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 2*longest)
			defer cancel()
			err = DrainHere(ctx, name, Draining{Undo: again}, progress)
			return nil
		})
		return err
	}
	comes := func() bool {
		c := w.dial()
		defer c.Close()
		if err := c.ask("new"); err != nil {
			t.Fatal(err)
		}
		return w.serves(c) == 1
	}
	// A backend without sessions is empty only once it gets no new ones.
	w.eventually("new sessions come", comes)
	if err := drain("s1", false, func(Drained) {}); err != nil {
		t.Fatal(err)
	}
	for range 12 {
		if comes() {
			t.Fatal("a new session came to the server that is drained")
		}
	}
	if err := drain("", true, nil); err != nil {
		t.Fatal(err)
	}
	before := status(w.servers[0]).Out
	var clients []*client
	at := map[int]int{}
	for range 200 { // by chance few come to the first, or none before the load balancer knows it
		if len(clients) >= 12 && at[1] >= 3 {
			break
		}
		c := w.dial()
		if err := c.ask("hello"); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, c)
		at[w.serves(c)]++
	}
	t.Logf("sessions by server: %v", at)
	if at[1] == 0 {
		t.Fatal("no session to move")
	}
	var steps []Drained
	if err := drain("s2", false, func(Drained) {}); err == nil || !strings.Contains(err.Error(), "this is s1") {
		t.Errorf("another server's name: %v", err)
	}
	if err := drain("s1", false, func(d Drained) { steps = append(steps, d) }); err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", steps)
	w.eventually("no session is on its way", func() bool { return status(w.servers[0]).Sending == 0 })
	if st := status(w.servers[0]); int(st.Out-before) != at[1] || !st.Draining {
		t.Errorf("%d of %d sessions have moved, draining %v", st.Out-before, at[1], st.Draining)
	}
	for _, c := range clients {
		if n := w.serves(c); n < 2 {
			t.Errorf("server %d still has %s", n, c.LocalAddr())
		}
		if err := c.ask("and again"); err != nil {
			t.Error(err)
		}
	}
	for range 6 {
		if comes() {
			t.Error("a new session came to the server that is drained")
		}
	}
	if err := drain("", true, nil); err != nil {
		t.Fatal(err)
	}
	w.eventually("new sessions come again", comes)
	// The last backend of a service is not drained by mistake.
	drainAt := func(n int, how Draining) (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*longest)
		defer cancel()
		w.in(w.servers[n].ns, func() error { err = DrainHere(ctx, "", how, func(Drained) {}); return nil })
		return err
	}
	for n := range 2 {
		if err := drainAt(n, Draining{}); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("the last backend knows that it is the last", func() bool {
		err := drainAt(2, Draining{})
		if err == nil { // the load balancer has not told it of the others yet
			err = drainAt(2, Draining{Undo: true})
		}
		return err != nil && strings.Contains(err.Error(), "talk") && strings.Contains(err.Error(), "nothing was changed")
	})
	if st := status(w.servers[2]); st.Draining {
		t.Error("the last backend drains")
	}
	// Without a load balancer nothing changes.
	if err := drainAt(0, Draining{Undo: true}); err != nil {
		t.Fatal(err)
	}
	stopLB()
	w.eventually("the load balancer is gone", func() bool { return !status(w.servers[0]).LB })
	if err := drainAt(0, Draining{}); err == nil || !strings.Contains(err.Error(), "not connected") || status(w.servers[0]).Draining {
		t.Errorf("without a load balancer: %v, draining %v", err, status(w.servers[0]).Draining)
	}
}

// serves returns the number of the backend whose member has a client's session; 0: none.
func (w *world) serves(c *client) (number int) {
	_ = nstest.Poll(longest, func() error {
		for _, s := range w.servers {
			for _, session := range s.member.Member().Sessions() {
				if session.RemoteAddr().String() == c.LocalAddr().String() {
					number = s.number
					return nil
				}
			}
		}
		return errors.New("no member has the session")
	})
	return number
}

// TestConfigErrors checks that errors of a file contain the position and a remedy.
func TestConfigErrors(t *testing.T) {
	const good = `
name: s1
number: 1
address: 10.0.0.1
listen: 10.0.0.1:7947
tls: {certificate: a, key: b, ca: c}
lb: {address: 10.0.0.9:7946}
devices: [eth0]
`
	if _, err := parseConfig("server.yaml", []byte(good)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ from, to, want string }{
		{"number: 1", "number: 2000", "from 1 to 1023"},
		{"number: 1", "nubmer: 1", `did you mean "number"`},
		{"listen: 10.0.0.1:7947", "listen: 0.0.0.0:7947", "advertise"},
		{"listen: 10.0.0.1:7947", "listen: here", "set the address for other backends' agents"},
		{"address: 10.0.0.1\n", "address: ten\n", "server.yaml:4"},
		{"devices: [eth0]", "devices: []", "name the interfaces"},
		{"devices: [eth0]", "devices: [eth0, eth1, eth0]", `"eth0" is listed twice`},
		{"address: 10.0.0.1\n", "address: 0.0.0.0\n", "set this backend's address for the load balancer"},
		{"address: 10.0.0.1\n", "address: ff02::1\n", "set this backend's address for the load balancer"},
		{"lb: {address: 10.0.0.9:7946}", "lb: {name: f}", "set the address of its agent"},
		{"lb: {address: 10.0.0.9:7946}", "lb: {address: 10.0.0.9:7946, name: f, names: [f, g]}", "either name, or names"},
		{"tls: {certificate: a, key: b, ca: c}", "tls: {certificate: a}", "certificate, key and ca"},
		{"number: 1", "number: 2000", "server.yaml:3:9: handoff.backend: number 2000"},
		{"lb: {address: 10.0.0.9:7946}", "lb: {address: nine}", "server.yaml:7:15: handoff.backend: lb: address"},
		{"devices: [eth0]", "devices: [eth0]\ntimeout: 1ms", "server.yaml:9:10: handoff.backend: timeout 1ms"},
	} {
		_, err := parseConfig("server.yaml", []byte(strings.Replace(good, c.from, c.to, 1)))
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "server.yaml") {
			t.Errorf("%s: %v", c.to, err)
		}
	}
}

// TestCarried checks that the agents' encodings are read back unchanged, and rejected if truncated or changed.
func TestCarried(t *testing.T) {
	k := kept{Receiving: true, ReuseAddr: true, Epoch: 7, Other: 3, Put: 99, Kernel: []byte("kernel"),
		Carried: carried{Name: "0", Label: "tcp :1790", State: []byte("state"), Unread: []byte("unread"), Replay: 12}}
	b := k.append(nil)
	got, err := parseKept(b)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(k) {
		t.Fatalf("%+v, %v", got, err)
	}
	whole := len(b) - len(k.Kernel)
	for n := range whole {
		if _, err := parseKept(b[:n]); err == nil {
			t.Errorf("%d bytes of %d were taken", n, whole)
		}
	}
	if _, err := parseKept([]byte("an application's state, whatever it is")); !errors.Is(err, errCarried) {
		t.Error(err)
	}
	b[len(wire.MoveMagic)]++
	if _, err := parseKept(b); err == nil {
		t.Error("another version was taken")
	}
}
