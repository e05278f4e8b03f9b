// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// lines is a writer that sends the lines of a log.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// TestRunWaitsForItsPredecessor checks that an agent waits for the addresses of a killed but still
// terminating one.
func TestRunWaitsForItsPredecessor(t *testing.T) {
	sc := newScene(t)
	root := kernel.OpenRoot(nstest.BPFFS + "/lb-again")
	before := map[string]net.Listener{}
	do(t, sc.middle, func() (err error) {
		for _, at := range []string{"10.2.0.1:7946"} {
			if before[at], err = net.Listen("tcp", at); err != nil {
				return err
			}
		}
		return nil
	})
	c, err := parseConfig("weir.yaml", []byte(fileOf(peertest.NewAuthority(t), sc.devices, "register: true\n")))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log, done := make(lines, 1000), make(chan error, 1)
	go func() {
		err := sc.middle.Do(func() error { return Run(ctx, root, c, slog.New(slog.NewTextHandler(log, nil))) })
		close(log)
		done <- err
	}()
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	free, runs := map[string]bool{}, false
	for line := range log {
		for at, l := range before {
			if strings.Contains(line, "address="+at) {
				l.Close()
				if free[at] = strings.Contains(line, "address is free"); free[at] && len(free) == 1 {
					time.AfterFunc(200*time.Millisecond, sc.f.Close) // frees the buffer device: Run waits for it next
				}
			}
		}
		if strings.Contains(line, "load balancer agent running") && strings.Contains(line, "services=2") {
			runs = true
			cancel()
		}
	}
	if err := <-done; err != nil || !runs || !free["10.2.0.1:7946"] {
		t.Errorf("it runs: %t, free were %v: %v", runs, free, err)
	}
}

// TestControlWaits checks that Listen waits for a control socket while a killed agent still answers
// there.
func TestControlWaits(t *testing.T) {
	nstest.NeedRoot(t)
	const name = "lb-again-test"
	before, err := control.Listen(t.Context(), name, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	log, done := make(lines, 10), make(chan error, 1)
	go func() {
		l, err := control.Listen(t.Context(), name, slog.New(slog.NewTextHandler(log, nil)))
		if err == nil {
			l.Close()
		}
		done <- err
	}()
	if line := <-log; !strings.Contains(line, "address is in use") {
		t.Errorf("said %s", line)
	}
	before.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
