// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/nstest"
)

const (
	nobody  = 65534
	readers = 4747
)

// foreign turns a service's meta into one of another layout.
func (w world) foreign() {
	w.t.Helper()
	all, err := w.Root.Instances("steer")
	if err != nil {
		w.t.Fatal(err)
	}
	i := all[len(all)-1]
	m, err := ebpf.LoadPinnedMap(filepath.Join(w.Root.Path(), i.Scope, i.Feature, i.Name, "meta"), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer m.Close()
	b, err := m.LookupBytes(uint32(0))
	if err != nil {
		w.t.Fatal(err)
	}
	b[4] ^= 2
	if err := m.Put(uint32(0), b); err != nil {
		w.t.Fatal(err)
	}
}

var (
	address = regexp.MustCompile(`address=(\S+)`)
	keeping = regexp.MustCompile(`keeping sessions of members|sessions are kept by another keeper`)
)

// serving is a running Serve.
type serving struct {
	w      world
	url    string
	socket string
	stop   func() error

	register string
	handoff  string
	log      *nstest.Log
}

func (w world) serve() *serving {
	w.t.Helper()
	return w.serveWith(socketDir(w.t), ServeOptions{})
}

// serveWith is serve with sockets in a directory, and more options.
func (w world) serveWith(dir string, o ServeOptions) *serving {
	w.t.Helper()
	s := &serving{w: w, socket: filepath.Join(dir, "weir.sock"), register: filepath.Join(dir, "register.sock"), handoff: filepath.Join(dir, "handoff.sock")}
	log := &nstest.Log{}
	s.log = log
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		o.Sockets = map[string]string{"steer": s.register, "keeper": s.handoff}
		o.Listen, o.Socket, o.Log = "127.0.0.1:0", s.socket, slog.New(slog.NewTextHandler(log, nil))
		done <- w.Serve(ctx, o)
	}()
	s.stop = sync.OnceValue(func() error { cancel(); return <-done })
	w.t.Cleanup(func() {
		if err := s.stop(); err != nil {
			w.t.Error(err)
		}
	})
	nstest.Until(w.t, "Serve listens", func() bool { return log.Find(address) != nil })
	s.url = "http://" + log.Find(address)[1]
	nstest.Until(w.t, "sessions are kept", func() bool { return log.Find(keeping) != nil })
	for _, path := range []string{s.socket, s.register} {
		nstest.Eventually(w.t, func() error {
			c, err := net.Dial("unix", path)
			if err == nil {
				c.Close()
			}
			return err
		})
	}
	return s
}

// socketDir returns a directory searchable by all users, unlike t.TempDir.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "weir-host-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// get queries the TCP port, or the group's socket for paths below /v1/.
func (s *serving) get(path string) (status int, body string) {
	s.w.t.Helper()
	if strings.HasPrefix(path, "/v1/") {
		return s.fetch(s.groupClient(), "http://weir"+path)
	}
	return s.fetch(http.DefaultClient, s.url+path)
}

func (s *serving) groupClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", s.socket)
	}}}
}

func (s *serving) fetch(c *http.Client, url string) (status int, body string) {
	s.w.t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		s.w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestServeHTTP(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(oneService, pid))
	heard(t, "127.0.0.5:0", "127.0.0.1:4739")
	w.bind("dns", "127.20.0.0/16")
	heard(t, "127.0.0.5:0", "127.20.0.1:53")
	s := w.serve()
	if status, body := s.get("/healthz"); status != http.StatusOK || body != "ok\n" {
		t.Errorf("/healthz: %d %s", status, body)
	}
	status, body := s.get("/metrics")
	if status != http.StatusOK {
		t.Errorf("/metrics: %d %s", status, body)
	}
	checkMetrics(t, body, fmt.Sprintf(`weir_steer_slot_admitted{member="pid %d",netns="[^"]*",service="telemetry",slot="0"} 1`, pid),
		`weir_steer_slot_admitted{member="",netns="[^"]*",service="telemetry",slot="1"} 0`,
		`weir_steer_packets_total{netns="[^"]*",protocol="udp",service="telemetry",slot="[01]",verdict="(steered|rejected)"} 1`,
		`weir_steer_slot_buckets{netns="[^"]*",service="telemetry",slot="0"} [1-9]`,
		`weir_steer_slot_since_timestamp_seconds{netns="[^"]*",service="telemetry",slot="0"} 1`,
		`weir_steer_socket_queue{listen="udp4 :4739",netns="[^"]*",service="telemetry",slot="0"} [0-9]`,
		`weir_steer_socket_drops_total{listen="tcp4 :4739",netns="[^"]*",service="telemetry",slot="0"} 0`,
		`weir_steer_socket_buffer_bytes{listen="udp4 :4739",netns="[^"]*",service="telemetry",slot="0"} [1-9]`,
		`weir_steer_socket_backlog_connections{listen="tcp4 :4739",netns="[^"]*",service="telemetry",slot="0"} [1-9]`,
		`weir_steer_devices{netns="[^"]*",service="telemetry",slot="[01]"} 1`,
		`weir_steer_bindings{netns="net:[^"]*",service="dns"} 1`,
		`weir_steer_registered_sockets{kind="udp4",netns="net:[^"]*",service="dns"} 0`,
		`weir_steer_dispatched_packets_total{netns="net:[^"]*",result="rejected",service="dns"} 1`,
		`weir_steer_up 1`, `go_goroutines [1-9]`, `process_open_fds [1-9]`)
	if status, _ := s.get("/v1/absent"); status != http.StatusNotFound {
		t.Errorf("an unknown path gives %d", status)
	}
	w.foreign()
	if status, body := s.get("/healthz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "pins of another version") {
		t.Errorf("/healthz with pins of another version: %d %s", status, body)
	}
	if _, body := s.get("/metrics"); !strings.Contains(body, "\nweir_steer_up 0\n") {
		t.Error("/metrics with pins of another version lacks weir_steer_up 0")
	}
	if err := s.stop(); err != nil {
		t.Errorf("Serve ended with %v", err)
	}
	if _, err := os.Stat(s.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

// checkMetrics checks that each pattern matches, and that all weir metrics have names within the scheme.
func checkMetrics(t *testing.T, body string, patterns ...string) {
	t.Helper()
	if lacks := lackedMetrics(body, patterns...); len(lacks) > 0 {
		t.Errorf("/metrics lacks %s", strings.Join(lacks, "\n"))
	}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (weir_\S*) (\S+)`).FindAllStringSubmatch(body, -1) {
		// The keeper of handoff has no pins, and so is not in the list.
		ofFeature := slices.ContainsFunc(append(Features(), "handoff"), func(f string) bool { return strings.HasPrefix(m[1], "weir_"+f+"_") })
		ofHost := m[1] == "weir_healthy" || m[1] == "weir_faults" || m[1] == "weir_metrics_dropped_total" || strings.HasPrefix(m[1], "weir_config_")
		if !ofFeature && !ofHost || (m[2] == "counter") != strings.HasSuffix(m[1], "_total") {
			t.Errorf("metric %s is a %s", m[1], m[2])
		}
	}
}

// lackedMetrics returns the patterns without a match. Braces in them are literal.
func lackedMetrics(body string, patterns ...string) []string {
	return slices.DeleteFunc(patterns, func(p string) bool {
		return regexp.MustCompile("(?m)^" + strings.NewReplacer("{", `\{`, "}", `\}`).Replace(p)).MatchString(body)
	})
}

func TestServeSocket(t *testing.T) {
	w := newWorld(t)
	w.apply(w.config(oneService, absent))
	w.setGroup(readers)
	s := w.serve()
	st, err := os.Stat(s.socket)
	if err != nil {
		t.Fatal(err)
	}
	if gid := st.Sys().(*syscall.Stat_t).Gid; st.Mode().Perm() != 0o660 || gid != readers {
		t.Errorf("socket has mode %v and group %d, want 0660 and %d", st.Mode(), gid, readers)
	}
	err = w.Serve(t.Context(), ServeOptions{Socket: s.socket, Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "another weir serve answers on "+s.socket) {
		t.Errorf("a second one on the socket: %v", err)
	}
	err = w.Serve(t.Context(), ServeOptions{Listen: "127.0.0.1:99999", Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.HasPrefix(err.Error(), "serve metrics: ") {
		t.Errorf("an address that is none: %v", err)
	}
}

// The socket of a running weir serve follows a changed group: a revoked one reads nothing more. The plan names the change.
func TestServeFollowsTheGroup(t *testing.T) {
	withGroups(t, "root:x:0:", "weir:x:4711:", "collectors:x:4712:")
	w := newWorld(t)
	w.apply(w.config(oneService, absent))
	s := w.serve()
	c := w.config(oneService, absent)
	c.Group = "collectors"
	plan, err := w.Plan(t.Context(), c)
	if err != nil || len(plan.Steps) == 0 || plan.Steps[0].String() != "change readers: group collectors in place of weir" {
		t.Errorf("%v, %v", plan.Steps, err)
	}
	var done []string
	if err := w.Apply(t.Context(), c, func(d Done) { done = append(done, d.Step.String()) }); err != nil || len(done) == 0 || done[0] != plan.Steps[0].String() {
		t.Errorf("%q, %v", done, err)
	}
	nstest.Until(t, "the socket has the group of the pins", func() bool {
		st, err := os.Stat(s.socket)
		return err == nil && groupOf(st) == 4712 && st.Mode().Perm() == 0o660
	})
}

// A rejected apply changes no group. The rollback of an unconfirmed change restores it. A reader's connection ends with its
// answer, so a reader of the former group cannot go on.
func TestGroupIsAStep(t *testing.T) {
	withGroups(t, "root:x:0:", "weir:x:4711:", "collectors:x:4712:")
	w := newWorld(t)
	w.apply(w.config(oneService, absent))
	c := w.config("group: collectors\n"+oneService, absent)
	more := w.config(twoServices, absent)
	more.Confirm = time.Hour
	w.apply(more)
	if err := w.Apply(t.Context(), c, func(d Done) { t.Errorf("did %s", d.Step) }); !errors.Is(err, errUnconfirmed) {
		t.Errorf("a change waits: %v", err)
	}
	w.wantGroup(4711)
	if err := w.Confirm(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Confirm = time.Hour
	w.apply(c)
	w.wantGroup(4712)
	w.rollback()
	w.wantGroup(4711)
	s := w.serve()
	client := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", s.socket) }}}
	resp, err := client.Get("http://weir/v1/status")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if !resp.Close {
		t.Error("the connection stays open")
	}
}

// Any user can occupy the metrics port while no weir serve runs. Everything else works, the failure names the user, and
// the metrics are served once the port is free.
func TestServeWithoutMetricsPort(t *testing.T) {
	w := newWorld(t)
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	log := &nstest.Log{}
	socket := filepath.Join(socketDir(t), "weir.sock")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- w.Serve(ctx, ServeOptions{Listen: taken.Addr().String(), Socket: socket, Log: slog.New(slog.NewTextHandler(log, nil))})
	}()
	healthy := func() string {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", socket) }}}
		r, err := client.Get("http://weir/healthz")
		if err != nil {
			return ""
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		return string(text)
	}
	want := "cannot serve metrics: listen tcp4 " + taken.Addr().String() + ": bind: address already in use: a socket of user root (0) has it"
	nstest.Until(t, "the failure is told", func() bool { return strings.Contains(healthy(), want) })
	taken.Close()
	nstest.Until(t, "metrics are served", func() bool { return log.Find(address) != nil })
	nstest.Until(t, "the failure is over", func() bool { return healthy() == "ok\n" })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The socket of a killed weir serve does not block the next one.
func TestServeAfterAKilledOne(t *testing.T) {
	nstest.NeedRoot(t)
	path := filepath.Join(socketDir(t), "weir.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	again, err := newWorld(t).listenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func (w world) setGroup(gid int) {
	w.t.Helper()
	l, err := w.Root.Lock(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Unlock()
	if err := l.SetGroup(gid); err != nil {
		w.t.Fatal(err)
	}
}

func TestServeAnswersBadQuestions(t *testing.T) {
	w := newWorld(t)
	w.apply(w.config(oneService, absent))
	s := w.serve()
	for path, want := range map[string]string{
		"/v1/steer/where?address=router":                 `is not an IP address`,
		"/v1/steer/where?address=::1&slots=x":            `slots "x": want a whole number`,
		"/v1/steer/where?address=::1&without=0,y":        `without "y": want whole numbers`,
		"/v1/steer/where?address=::1&slots=1000":         `1000 slots: want a number from 1 to`,
		"/v1/steer/where?address=::1&without=7":          `slot 7: there are slots 0 to 1`,
		"/v1/steer/devices?service=other":                `service "other" is not steered (steered: telemetry)`,
		"/v1/steer/where?address=%zz":                    `invalid URL escape`,
		"/v1/steer/where?service=telemetry&without=-1":   `slot -1`,
		"/v1/steer/where?service=telemetry&slots=-1":     `-1 slots`,
		"/v1/steer/where?service=nobody&address=1.2.3.4": `service "nobody" is not steered`,
	} {
		if status, body := s.get(path); status != http.StatusUnprocessableEntity || !strings.Contains(body, want) {
			t.Errorf("%s: %d %q, want 422 with %q", path, status, body, want)
		}
	}
}
