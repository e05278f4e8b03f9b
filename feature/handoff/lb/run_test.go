// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
)

func fileOf(ca *peertest.Authority, devices []string, more string) string {
	cert, key, signers := ca.Files("lb")
	return fmt.Sprintf(`devices: [%s]
listen: 10.2.0.1:7946
tls: {certificate: %s, key: %s, ca: %s}
services:
  talk: {number: 0, listen: ["tcp 10.55.0.1:9000", "tcp [fd55::1]:9000"]}
  flows: {number: 1, listen: ["udp 10.55.0.1:4739"], by: source}
%s`, strings.Join(devices, ", "), cert, key, signers, more)
}

// running starts Run in place of a scene's own load balancer.
func running(t *testing.T, sc *scene, root *kernel.Root, text string) (stop func()) {
	t.Helper()
	c, err := parseConfig("weir.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- sc.middle.Do(func() error { close(ready); return Run(ctx, root, c, slog.New(slog.DiscardHandler)) })
	}()
	<-ready
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// status waits for a status of the load balancer.
func status(t *testing.T, root *kernel.Root, want func(Status) bool) Status {
	t.Helper()
	var all []Status
	nstest.Eventually(t, func() (err error) {
		all, err = Statuses(t.Context(), root)
		if err == nil && len(all) == 1 && want(all[0]) {
			return nil
		}
		return fmt.Errorf("status %+v, %v", all, err)
	})
	return all[0]
}

// registerTwo connects and registers as the agent of h2.
func registerTwo(t *testing.T, sc *scene, ca *peertest.Authority) (c *peer.Conn) {
	t.Helper()
	return registerTwoAt(t, sc, ca, "10.2.0.1:7946")
}

func registerTwoAt(t *testing.T, sc *scene, ca *peertest.Authority, at string) (c *peer.Conn) {
	t.Helper()
	do(t, sc.hosts[1], func() (err error) {
		c, err = peer.Dial(t.Context(), at, "lb", ca.TLS("h2"), peer.Hello{Number: 2, Instance: peer.NewInstance(), Name: "h2",
			Beside: &peer.Beside{Register: peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 2}}})
		return err
	})
	t.Cleanup(func() { c.Close() })
	go func() {
		for {
			if _, err := c.Receive(); err != nil {
				return
			}
		}
	}()
	return c
}

// TestRun checks the whole product: a file, named and registered hosts, status, metrics and an
// override. The agent stops and returns, and flows continue.
func TestRun(t *testing.T) {
	sc := newScene(t)
	sc.f.Close()
	serve(t, sc.hosts, service4)
	listenUDP(t, sc.hosts, flows4)
	root := kernel.OpenRoot(nstest.BPFFS + "/lb-run")
	ca := peertest.NewAuthority(t)
	text := fileOf(ca, sc.devices, "register: true\nbackends:\n  h1: {number: 1, address: 10.2.0.2, weight: 2}\n")
	stop := running(t, sc, root, text)
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	status(t, root, func(s Status) bool { return s.Agent && len(s.Backends) == 1 && s.Backends[0].Up })
	connect := func() *peer.Conn { return registerTwo(t, sc, ca) }
	two := connect()
	both := func(s Status) bool { return s.Agent && len(s.Backends) == 2 && s.Backends[0].Up && s.Backends[1].Up }
	s := status(t, root, both)
	if h := s.Backends[1]; h.Name != "h2" || h.Where != "h2" || !h.Connected || h.Weight != 2 || s.Name != "lb" {
		t.Errorf("%+v", s)
	}
	if v, _ := explains(t, root, sc.middle, "c", "tcp", client(service4, 20000), service4); !strings.HasPrefix(v.Result, "backend h") || !strings.Contains(v.Result, " (number ") || v.Warning {
		t.Errorf("explained by the agent's names: %+v", v)
	}
	// The data path follows the status a moment later.
	for end := time.Now().Add(patience); ; {
		of := owners(t, sc, service4, 30)
		if of['1'] >= 5 && of['2'] >= 5 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("30 flows: %v", of)
		}
	}
	for _, host := range []string{"h2", "h1"} {
		if err := Override(t.Context(), root, "lb", "flows", "10.1.0.2", host); err != nil {
			t.Fatal(err)
		}
		if got, err := askUDP(dialUDP(t, sc.client, flows4), "a"); err != nil || got[0] != host[1] {
			t.Errorf("%q, %v: want %s", got, err, host)
		}
	}
	for _, wrong := range [][3]string{{"flows", "10.1.0.2", "h3"}, {"flow", "10.1.0.2", "h1"}, {"talk", "10.1.0.2", "h1"}} {
		if err := Override(t.Context(), root, "lb", wrong[0], wrong[1], wrong[2]); err == nil {
			t.Errorf("%v is no error", wrong)
		}
	}
	c := dial(t, sc.client, service4)
	first, err := ask(c, "a", patience)
	if err != nil {
		t.Fatal(err)
	}
	page := metrics(root)
	for _, want := range []string{`weir_lb_backend_up{backend="h2",lb="lb"} 1`, `weir_lb_packets_total{lb="lb",verdict="to_backend"}`, `weir_lb_flows{backend="h1",lb="lb"}`, `weir_lb_agent_up{lb="lb"} 1`} {
		if !strings.Contains(page, want) {
			t.Errorf("no %s in\n%s", want, page)
		}
	}
	stop()
	two.Close()
	if s := status(t, root, func(Status) bool { return true }); s.Agent || s.Flows == 0 {
		t.Errorf("without an agent: %+v", s)
	}
	if again, err := ask(c, "b", patience); err != nil || again[0] != first[0] {
		t.Errorf("%q, %v", again, err)
	}
	stop = running(t, sc, root, text)
	defer func() { stop() }()
	nstest.Steadily(t, 500*time.Millisecond, func() error { // the agent knows only one host, and the data path keeps both
		if of := owners(t, sc, service4, 30); of['2'] == 0 {
			return fmt.Errorf("30 flows: %v", of)
		}
		return nil
	})
	connect()
	status(t, root, both)
	if again, err := ask(c, "c", patience); err != nil || again[0] != first[0] {
		t.Errorf("%q, %v", again, err)
	}
}

func metrics(root *kernel.Root) string {
	w := httptest.NewRecorder()
	scrape.Handler(Feature{}.Collector(root)).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}

// TestConfigErrors checks that each error of a file has its position.
func TestConfigErrors(t *testing.T) {
	ca := peertest.NewAuthority(t)
	good := fileOf(ca, []string{"eth0"}, "backends:\n  a: {number: 1, address: 10.0.0.1}\n")
	if c, err := parseConfig("weir.yaml", []byte(good)); err != nil || c.Backends["a"].EffectiveWeight() != 1 || len(c.ServiceAddresses()) != 3 {
		t.Fatalf("%+v, %v", c, err)
	}
	for _, e := range []struct{ from, to, says string }{
		{"number: 1, address", "number: 1024, address", "backends.a: number 1024: want an unused number from 1 to 1023"},
		{"address: 10.0.0.1", "weight: 1", "backends.a: address: give its address"},
		{"address: 10.0.0.1", "address: 10.0.0.1, wieght: 1", "weight"},
		{"address: 10.0.0.1", "address: 10.0.0.1, weight: -1", "weight -1"},
		{"address: 10.0.0.1", "address: 10.0.0.1, check: here", `check "here"`},
		{"address: 10.0.0.1", "address: 10.0.0.1, services: [x]", `no service "x" in lb.services`},
		{"by: source", "by: sorcery", `services.flows: by "sorcery"`},
		{"udp 10.55.0.1:4739", "udp 10.55.0.0/24:4739", "want one address"},
		{"udp 10.55.0.1:4739", "tcp 10.55.0.1:9000", "is flows's"},
		{"talk: {number: 0", "talk: {number: 1", "number 1: want an unused number"},
		{"udp 10.55.0.1:4739", "udp 224.0.0.1:4739", "want a unicast address"},
		{"udp 10.55.0.1:4739", "udp 127.0.0.1:4739", "want a unicast address"},
		{"address: 10.0.0.1", "address: 10.55.0.1", "backends.a: address 10.55.0.1 belongs to service"},
		{"address: 10.0.0.1", "address: 127.0.0.1", "backends.a: address 127.0.0.1"},
		{"a: {number: 1, address: 10.0.0.1}", "a: {number: 1, address: 10.0.0.1}\n  b: {number: 2, address: 10.0.0.1}", "belongs to backend a"},
		{"devices: [eth0]", "devices: [eth0, eth1, eth0]", `devices: "eth0" is listed twice`},
		{"devices: [eth0]", "devices: [eth0]\nbuffer_timeout: 2h", "buffer_timeout plus move_timeout, 2h0m10s"},
		{"devices: [eth0]", "devices: [eth0]\nname: ''", `name ""`},
		{"devices: [eth0]", "devices: []", "devices: name the interfaces"},
		{"listen: 10.2.0.1:7946", "listen: x", `listen "x"`},
		{"devices: [eth0]", "devices: [eth0]\ntunnel_mtu: 100", "tunnel_mtu 100"},
		{"devices: [eth0]", "devices: [eth0]\nbuffer_timeout: 1ms", "buffer_timeout 1ms"},
		{"devices: [eth0]", "devices: [eth0]\nidle_timeout: 10s", "buffer_timeout plus move_timeout, 11s"},
		{"devices: [eth0]", "devices: [eth0]\nidle_timeout: 20s\nbuffer_timeout: 5s\nmove_timeout: 16s", "buffer_timeout plus move_timeout, 21s"},
		{"devices: [eth0]", "devices: [eth0]\nname: a/b", `name "a/b"`},
	} {
		text := strings.Replace(good, e.from, e.to, 1)
		if _, err := parseConfig("weir.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), e.says) || !strings.Contains(err.Error(), "weir.yaml:") {
			t.Errorf("%s: %v, want %q with its place", e.to, err, e.says)
		}
	}
	text := strings.Replace(good, "devices: [eth0]", "devices: [eth0]\nbuffer_timeout: 1ms", 1)
	line := 1 + strings.Count(text[:strings.Index(text, "buffer_timeout:")], "\n")
	if _, err := parseConfig("weir.yaml", []byte(text)); err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("weir.yaml:%d:17: lb: buffer_timeout 1ms", line)) {
		t.Errorf("%v, want it at line %d", err, line)
	}
}

// TestWrongAnswerOfAgent checks that a wrong answer at an agent's socket is reported with the socket,
// beside everything known without the agent.
func TestWrongAnswerOfAgent(t *testing.T) {
	sc := newScene(t)
	sc.f.Close()
	root := kernel.OpenRoot(nstest.BPFFS + "/lb-wrong")
	running(t, sc, root, fileOf(peertest.NewAuthority(t), sc.devices, "register: true\n"))()
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	for answer, code := range map[string]int{"": 200, `{"flows":`: 200, `{"backends":[{"address":"x"}]}`: 200, "one\n! two": 500} {
		ctx, cancel := context.WithCancel(t.Context())
		l, err := control.Listen(ctx, controlName(kernel.ScopeOf(sc.middle), "lb"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			done <- control.Serve(ctx, l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(code)
				_, _ = io.WriteString(w, answer)
			}), slog.New(slog.DiscardHandler))
		}()
		part, err := Feature{}.Report(t.Context(), root, nil)
		all := part.(Report).Balancers
		if err != nil || len(all) != 1 || all[0].Name != "lb" || all[0].Agent || !strings.HasPrefix(all[0].Problem, l.Addr().String()+": ") || strings.Contains(all[0].Problem, "\n") {
			t.Errorf("answer %q: %+v, %v", answer, all, err)
		} else if f := all[0].Findings(); len(f) == 0 || !strings.Contains(f[0].Text, l.Addr().String()) {
			t.Errorf("answer %q: findings %+v", answer, f)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
