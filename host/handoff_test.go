// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/internal/nstest"
)

// playKept is a member of a service with sessions kept by weir serve: KEEPER SERVICE ADDRESS. It prints the data read
// from each session so far, by any process.
func playKept(f []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	l, err := handoff.Listen(ctx, "tcp", f[2], handoff.Options{Service: f[1], Name: "0", Keeper: f[0]})
	if err != nil {
		fmt.Println(err)
		return nil
	}
	fmt.Println("ready")
	go func() { io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
	for {
		s, err := l.AcceptSession()
		if err != nil {
			return err
		}
		go func() {
			all, b := string(s.State()), make([]byte, 100)
			for {
				n, err := s.Read(b)
				if err != nil {
					return
				}
				all += string(b[:n])
				fmt.Fprintln(s, all)
				if s.Commit([]byte(all)) == nil {
					fmt.Println("committed")
				}
			}
		}()
	}
}

// weir serve keeps sessions of the members named in the configuration, and of no others.
func TestServeKeepsSessions(t *testing.T) {
	w := newWorld(t)
	pidfile := filepath.Join(t.TempDir(), "pid")
	w.apply(w.config(registering, pidfile))
	s := w.serve()
	member := func(uid uint32, service string) *nstest.Process {
		c := nstest.Child("kept", s.handoff, service, "127.0.0.1:4740")
		c.Dir = "/"
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		return nstest.Start(t, c)
	}
	for _, x := range []struct {
		uid     uint32
		service string
		want    string
	}{
		{4242, "telemetry", `user 4242 is no member of service "telemetry"`},
		{nobody, "dns", `service "dns": not there`},
	} {
		p := member(x.uid, x.service)
		if line, _ := p.Line(); !strings.Contains(line, x.want) || !strings.Contains(line, "refused") && !strings.Contains(line, "keeper") {
			t.Errorf("user %d, service %s: %s", x.uid, x.service, line)
		}
		p.Kill()
	}
	p := member(nobody, "telemetry")
	p.Expect("ready")
	c, err := net.Dial("tcp", "127.0.0.1:4740")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := make([]byte, 100)
	say := func(what, want string) {
		t.Helper()
		c.SetDeadline(time.Now().Add(30 * time.Second))
		fmt.Fprint(c, what)
		if n, err := c.Read(b); err != nil || string(b[:n]) != want+"\n" {
			t.Fatalf("heard %q, %v; want %q", b[:n], err, want)
		}
	}
	say("one", "one")
	p.Expect("committed") // it answers first
	p.Kill()
	p = member(nobody, "telemetry")
	p.Expect("ready")
	say("two", "onetwo")
	_, metrics := s.get("/metrics")
	for _, want := range []string{`weir_handoff_moves_total{by="crash",service="telemetry"} 1`, `weir_handoff_sessions{is="owned",kind="session",service="telemetry"} 1`,
		`weir_handoff_members{service="telemetry"} 1`, "weir_handoff_refused_processes_total 2"} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	// weir serve restarts: the session continues meanwhile, and the next weir serve keeps it.
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	say("three", "onetwothree")
	s = w.serve()
	nstest.Eventually(t, func() error {
		r, err := handoff.Status(t.Context(), s.handoff)
		if err == nil && len(r.Services) == 0 {
			return nil // another socket: this member does not know it
		}
		return fmt.Errorf("status %+v, %v", r, err)
	})
	// An existing keeper does not prevent the other tasks of weir serve.
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- w.Serve(ctx, ServeOptions{Sockets: map[string]string{"keeper": s.handoff}, Log: slog.New(slog.DiscardHandler)})
	}()
	select {
	case err := <-done:
		t.Errorf("weir serve beside a keeper: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
