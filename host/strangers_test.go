// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// The TCP port serves only metrics and health; the group's socket serves everything.
func TestTCPTellsNoState(t *testing.T) {
	w := newWorld(t)
	w.apply(w.config(oneService, absent))
	s := w.serve()
	for _, path := range []string{"/v1/status", "/v1/faults", "/v1/reroute/status", "/v1/guard/status", "/v1/filter/status", "/v1/lb/status", "/v1/backend/status", "/v1/steer/status",
		"/v1/steer/devices?service=telemetry", "/v1/steer/templates?service=telemetry", "/v1/steer/bindings", "/v1/steer/services", "/v1/steer/where?address=192.0.2.1"} {
		if status, body := s.fetch(http.DefaultClient, s.url+path); status != http.StatusNotFound {
			t.Errorf("TCP %s: %d %.60s", path, status, body)
		}
		if status, body := s.get(path); status != http.StatusOK {
			t.Errorf("the group's %s: %d %s", path, status, body)
		}
	}
	for _, path := range []string{"/metrics", "/healthz"} {
		for _, url := range []string{s.url, "http://weir"} {
			c := http.DefaultClient
			if url == "http://weir" {
				c = s.groupClient()
			}
			status, body := s.fetch(c, url+path)
			if status != http.StatusOK || strings.Contains(body, "seed") {
				t.Errorf("%s%s: %d", url, path, status)
			}
		}
	}
}

// Idle foreign connections to each socket leave room for a scrape, a registration and a member.
func TestIdleStrangers(t *testing.T) {
	w := newWorld(t)
	w.apply(w.config(registering, "/nonexistent"))
	s := w.serve()
	for i := range 1500 {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, byte(i), 1)}}
		c, err := d.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		fmt.Fprint(c, "GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
	}
	if n := openSockets(t, s); n > 600 {
		t.Errorf("weir serve holds %d connections of strangers", n)
	}
	if status, _ := s.get("/metrics"); status != http.StatusOK {
		t.Errorf("/metrics: %d", status)
	}
	if line, _, end := s.collector(nobody, asCollector("telemetry 0 127.0.0.1:4739")); line != "registered" {
		t.Errorf("registration behind idle connections: %s", line)
	} else {
		end()
	}
}

// openSockets counts the open connections to the TCP port with a request on each.
func openSockets(t *testing.T, s *serving) int {
	t.Helper()
	_, body := s.get("/metrics")
	n := 0.0
	for line := range strings.Lines(body) {
		if _, err := fmt.Sscanf(line, "process_open_fds %f", &n); err == nil {
			return int(n) - 1500 // the test's own ends
		}
	}
	t.Fatal(io.ErrUnexpectedEOF)
	return 0
}

// A foreign process at the keeper's abstract name prevents only the keeping of sessions.
func TestServeBesideImpostor(t *testing.T) {
	w := newWorld(t)
	name := fmt.Sprintf("@weir-serve-impostor-%d", os.Getpid())
	nstest.AsUser(t, nobody, func() error {
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: name, Net: "unixpacket"})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	log := &nstest.Log{}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- w.Serve(ctx, ServeOptions{Listen: "127.0.0.1:0", Sockets: map[string]string{"keeper": name}, Log: slog.New(slog.NewTextHandler(log, nil))})
	}()
	said := regexp.MustCompile(`sessions are not kept.*user 65534`)
	nstest.Until(t, "weir serve tells of the stranger", func() bool { return log.Find(said) != nil })
	resp, err := http.Get("http://" + log.Find(address)[1] + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
