// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// onWarn is a log that calls a function after its first line.
type onWarn struct {
	bytes.Buffer
	once sync.Once
	f    func()
}

func (o *onWarn) Write(p []byte) (int, error) {
	o.once.Do(o.f)
	return o.Buffer.Write(p)
}

// TestAgain checks that a listener waits for its predecessor to end, and logs it.
func TestAgain(t *testing.T) {
	before, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	log := &onWarn{f: func() { before.Close() }}
	l, err := TCP(t.Context(), slog.New(slog.NewTextHandler(log, nil)), before.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if text := log.String(); strings.Count(text, "address is in use") != 1 || strings.Count(text, "address is free") != 1 {
		t.Errorf("said %s", text)
	}
}

// TestAgainEnds checks that the wait is bounded, ends with the context, and applies to no other
// error.
func TestAgainEnds(t *testing.T) {
	quiet := slog.New(slog.DiscardHandler)
	taken := func() (net.Listener, error) { return nil, fmt.Errorf("here: %w", ErrAnswers) }
	began := time.Now()
	if _, err := Again(t.Context(), quiet, "a", taken); !errors.Is(err, ErrAnswers) || time.Since(began) < TakeOver {
		t.Errorf("%v after %s", err, time.Since(began))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	calls := 0
	_, err := Again(ctx, quiet, "a", func() (net.Listener, error) { calls++; return nil, syscall.EADDRINUSE })
	if !errors.Is(err, context.Canceled) || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
	calls = 0
	if _, err := Again(t.Context(), quiet, "a", func() (net.Listener, error) { calls++; return nil, fs.ErrPermission }); !errors.Is(err, fs.ErrPermission) || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
}

// TestTCPFamilies checks that 0.0.0.0 listens only on IPv4, so an IPv4 firewall covers it. [::] and
// an empty host listen on both families.
func TestTCPFamilies(t *testing.T) {
	six, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skip("need: kernel IPv6:", err)
	}
	six.Close()
	for address, want := range map[string]bool{"0.0.0.0:0": false, "[::]:0": true, ":0": true} {
		l, err := TCP(t.Context(), slog.New(slog.DiscardHandler), address)
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(l.Addr().String())
		for to, answers := range map[string]bool{"127.0.0.1": true, "::1": want} {
			c, err := net.Dial("tcp", net.JoinHostPort(to, port))
			if err == nil {
				c.Close()
			}
			if (err == nil) != answers {
				t.Errorf("listen %s: %s: %v", address, to, err)
			}
		}
		if a := l.Addr().(*net.TCPAddr).AddrPort().Addr(); a.Is4() == want {
			t.Errorf("listen %s is at %s", address, a)
		}
		l.Close()
	}
}

// TestTCPAhead checks that TCPAhead listens at addresses without an interface, and TCP does not.
func TestTCPAhead(t *testing.T) {
	for _, address := range []string{"192.0.2.77:0", "[2001:db8::77]:0"} {
		if l, err := TCP(t.Context(), slog.New(slog.DiscardHandler), address); err == nil {
			l.Close()
			t.Errorf("TCP listens at %s", address)
		}
		l, err := TCPAhead(t.Context(), slog.New(slog.DiscardHandler), address)
		if err != nil {
			t.Errorf("TCPAhead: %v", err)
			continue
		}
		l.Close()
	}
	for _, address := range []string{"0.0.0.0:0", "[::]:0", ":0", "127.0.0.1:0"} {
		l, err := TCPAhead(t.Context(), slog.New(slog.DiscardHandler), address)
		if err != nil {
			t.Errorf("TCPAhead: %v", err)
			continue
		}
		l.Close()
	}
}
