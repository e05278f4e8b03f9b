// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// watchedLog is a log written by another goroutine.
type watchedLog struct {
	mu sync.Mutex
	bytes.Buffer
}

func (l *watchedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(p)
}

func (l *watchedLog) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.String(), text)
}

// weir serve waits for all addresses of a killed predecessor that has not ended yet.
func TestServeWaitsForItsPredecessor(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	o := ServeOptions{Socket: filepath.Join(dir, "weir.sock"), Sockets: map[string]string{"steer": filepath.Join(dir, "register.sock"), "keeper": filepath.Join(dir, "handoff.sock")}}
	metrics, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Listen = metrics.Addr().String()
	before := map[string]net.Listener{o.Listen: metrics}
	for _, path := range []string{o.Socket, o.Sockets["steer"]} {
		if before[path], err = net.Listen("unix", path); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := keeper.Listen(o.Sockets["keeper"])
	if err != nil {
		t.Fatal(err)
	}
	before[o.Sockets["keeper"]] = kept
	log := &watchedLog{}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Serve(ctx, o) }()
	until := func(text string) {
		t.Helper()
		nstest.Eventually(t, func() error {
			if log.count(text) > 0 {
				return nil
			}
			if len(done) > 0 {
				t.Fatalf("ended without saying: %s\n%s", text, log.String())
			}
			return fmt.Errorf("never said: %s\n%s", text, log.String())
		})
	}
	for _, address := range []string{o.Listen, o.Socket, o.Sockets["steer"], o.Sockets["keeper"]} {
		until("waiting for the predecessor to end\" address=" + address)
		before[address].Close()
		until("address is free\" address=" + address)
	}
	until("keeping sessions of members")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// INT and TERM end a weir serve that waits for its predecessor like a running one.
func TestServeEndsWhileItWaits(t *testing.T) {
	w := newWorld(t)
	for _, waits := range []string{"metrics", "group", "steer", "keeper"} {
		t.Run(waits, func(t *testing.T) {
			dir := t.TempDir()
			path := func(name string) string { return filepath.Join(dir, name+".sock") }
			o := ServeOptions{Listen: "127.0.0.1:0", Socket: path("group"), Sockets: map[string]string{"steer": path("steer"), "keeper": path("keeper")}}
			var before net.Listener
			var err error
			switch waits {
			case "metrics":
				if before, err = net.Listen("tcp", o.Listen); err == nil {
					o.Listen = before.Addr().String()
				}
			case "keeper":
				before, err = keeper.Listen(path("keeper"))
			default:
				before, err = net.Listen("unix", path(waits))
			}
			if err != nil {
				t.Fatal(err)
			}
			defer before.Close()
			log := &nstest.Log{}
			o.Log = slog.New(slog.NewTextHandler(log, nil))
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- w.Serve(ctx, o) }()
			nstest.Until(t, "it waits", func() bool { return log.Has("waiting for the predecessor to end") })
			cancel()
			if err := <-done; err != nil {
				t.Errorf("%v", err)
			}
		})
	}
}
