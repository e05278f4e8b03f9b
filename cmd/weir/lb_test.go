// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestLBCommands(t *testing.T) {
	nstest.NeedRoot(t)
	if err := kernel.Require(lb.Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	root := nstest.BPFFS + "/lb-command"
	if out, _, status := weir(t, "--root", root, "lb", "status"); status != 0 || !strings.Contains(out, "no load balancer: ") {
		t.Errorf("status %d: %s", status, out)
	}
	file := filepath.Join(t.TempDir(), "weir.yaml")
	cert, key, ca := peertest.NewAuthority(t).Files("edge")
	text := fmt.Sprintf("lb:\n  name: edge\n  devices: [lo]\n  listen: 127.0.0.1:7946\n  tls: {certificate: %s, key: %s, ca: %s}\n  services:\n    talk: {number: 0, listen: [tcp 10.55.0.1:9000]}\n", cert, key, ca)
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(text)
	if _, errs, status := weir(t, "--root", root, "serve", "--only", "lb", "-f", file); status != exitFailed || !strings.Contains(errs, file+":2:3: lb: backends: there are none") {
		t.Errorf("status %d: %s", status, errs)
	}
	write(text + "  register: true\n")
	p := nstest.Start(t, command("--root", root, "serve", "--only", "lb", "-f", file))
	waits := func(want func(lb.Status) bool) {
		t.Helper()
		var all []lb.Status
		nstest.Eventually(t, func() error {
			out, errs, status := weir(t, "--root", root, "lb", "status", "--json")
			if err := json.Unmarshal([]byte(out), &all); err != nil && out != "" {
				t.Fatalf("%v: %s", err, out)
			}
			if len(all) != 1 || !want(all[0]) {
				return fmt.Errorf("status %d: %s %s", status, out, errs)
			}
			return nil
		})
	}
	waits(func(s lb.Status) bool { return s.Agent && len(s.Backends) == 0 })
	// A reload passes the new section to the agent. A wrong section changes nothing.
	write(text + "  backends:\n    a: {number: 1, address: 10.55.0.9}\n")
	p.Signal(syscall.SIGHUP)
	waits(func(s lb.Status) bool { return s.Agent && len(s.Backends) == 1 })
	write(text + "  backends:\n    a: {number: 2000, address: 10.55.0.9}\n")
	if _, errs, status := weir(t, "--root", root, "apply", "-f", file); status != exitFailed || !strings.Contains(errs, "backends.a: number 2000") {
		t.Errorf("status %d: %s", status, errs)
	}
	waits(func(s lb.Status) bool { return s.Agent && len(s.Backends) == 1 })
	if out, _, status := weir(t, "--root", root, "status"); status != 0 || !strings.Contains(out, "load balancer edge in net:[") || !strings.Contains(out, "]: 0 flows, ") {
		t.Errorf("status %d: %s", status, out)
	}
	if _, errs, status := weir(t, "--root", root, "lb", "override", "talk", "192.0.2.1:5", "b"); status != exitFailed || !strings.Contains(errs, `no backend "b" with a known location`) {
		t.Errorf("status %d: %s", status, errs)
	}
	for line, want := range map[string]string{
		"lb override":                    "talk\n:4\n",
		"lb override talk 192.0.2.1:5":   "a\n:4\n",
		"lb override talk 192.0.2.1:5 a": ":4\n",
		"lb remove":                      "edge\n:4\n",
	} {
		if out, errs, status := weir(t, append(append([]string{"__complete", "--root", root}, strings.Fields(line)...), "")...); status != 0 || out != want {
			t.Errorf("%s: status %d, %s%s; want %s", line, status, out, errs, want)
		}
	}
	p.Kill() // the data path survives
	if out, _, status := weir(t, "--root", root, "lb", "status"); status != 0 || !strings.Contains(out, "its agent does not answer") {
		t.Errorf("status %d: %s", status, out)
	}
	if out, _, _ := weir(t, "--root", root, "doctor"); !strings.Contains(out, "load balancer edge") {
		t.Errorf("doctor does not tell of the agent: %s", out)
	}
	write("services: {}\n")
	if _, errs, status := weir(t, "--root", root, "apply", "-f", file); status != exitFailed || !strings.Contains(errs, "load balancer edge spreads traffic now") {
		t.Errorf("status %d: %s", status, errs)
	}
	for _, remove := range [][]string{{"remove", "lb"}, {"lb", "remove"}} {
		args := append([]string{"--root", root}, remove...)
		if _, errs, status := weir(t, args...); status != exitFailed || !strings.Contains(errs, "take served traffic") || !strings.Contains(errs, "spreads traffic now") {
			t.Errorf("%v: status %d: %s", remove, status, errs)
		}
	}
	if _, errs, status := weir(t, "--root", root, "lb", "remove", "other"); status != exitFailed || !strings.Contains(errs, "name one of edge") {
		t.Errorf("status %d: %s", status, errs)
	}
	for _, want := range []string{"removed load balancer edge\n", "nothing to remove: no load balancer in this network namespace\n"} {
		if out, errs, status := weir(t, "--root", root, "lb", "remove", "--allow-outage"); status != 0 || out != want {
			t.Errorf("status %d: %s%s", status, out, errs)
		}
	}
	if out, _, _ := weir(t, "--root", root, "lb", "status"); !strings.Contains(out, "no load balancer: ") {
		t.Errorf("%s", out)
	}
	if left, err := filepath.Glob(control.Path("lb-*-edge")); err != nil || len(left) > 0 {
		t.Errorf("the killed agent's socket is still there: %q, %v", left, err)
	}
	if out, errs, status := weir(t, "--root", root, "apply", "-f", file); status != 0 || !strings.Contains(out, "nothing to change") {
		t.Errorf("after remove, status %d: %s %s", status, out, errs)
	}
}

// Former files are rejected with the sections that replace them. weir accepts these sections.
func TestFormerFiles(t *testing.T) {
	const tls = "tls: {certificate: c.pem, key: k.pem, signers: ca.pem}\ndevices: [eth0]\n"
	for _, c := range []struct {
		command, text, has string
		right              func(d *feature.Document) bool
	}{
		{"front", "# ours\nlisten: 127.0.0.1:7946\nmetrics: 127.0.0.1:9745\n" + tls + "services:\n  talk: {number: 0, listen: [tcp 10.55.0.1:9000]}\nhosts:\n  a: {number: 1, address: 10.55.0.9} # the old one\n", "# the old one",
			func(d *feature.Document) bool {
				section, ok := lb.Feature{}.Spec(d)
				return ok && section.Name == "front" && section.TLS.CA != "" && section.Backends["a"].Number == 1
			}},
		{"server", "name: s1\nnumber: 1\naddress: 10.55.0.9\nlisten: 10.55.0.9:7947\npatience: 1s\nlimit: 5\nmetrics: 127.0.0.1:9745\nfront: {name: f, address: 10.55.0.1:7946}\n" + tls, "timeout: 1s",
			func(d *feature.Document) bool {
				b, ok := backend.Feature{}.Spec(d)
				return ok && b.Name == "s1" && b.TLS.CA != "" && b.LB.Name == "f" && b.Timeout == time.Second && b.MaxQueues == 5
			}},
		{"", "handoff: {hold: 2m, sessions: 7}\n", "max_sessions: 7",
			func(d *feature.Document) bool {
				l, ok := keeper.Feature{}.Spec(d)
				return ok && l.Hold == 2*time.Minute && l.Sessions == 7
			}},
	} {
		file := filepath.Join(t.TempDir(), "former.yaml")
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		for status, args := range map[int][]string{exitUsage: {"handoff", c.command, "-f", file}, exitFailed: {"apply", "-f", file}} {
			if args[1] == "" {
				continue
			}
			_, errs, got := weir(t, args...)
			_, section, ok := strings.Cut(errs, "put this into weir.yaml:\n\n")
			if got != status || !ok || !strings.Contains(section, c.has) {
				t.Fatalf("%v: status %d: %s", args, got, errs)
			}
			d, err := host.ParseConfig("weir.yaml", []byte(section))
			if err != nil {
				t.Fatalf("%v\n%s", err, section)
			}
			if !c.right(d.Document()) {
				t.Errorf("another section was made of %s:\n%s", c.text, section)
			}
		}
	}
}

// A former file without certificates is recognized by its other keys.
func TestFormerFilesWithoutTLS(t *testing.T) {
	for want, text := range map[string]string{
		"lb:\n":                  "devices: [lo]\nlisten: 127.0.0.1:7946\nservices:\n  talk: {number: 0, listen: [tcp 10.55.0.1:9000]}\n",
		"handoff:\n  backend:\n": "name: s1\nnumber: 1\naddress: 10.55.0.9\nlisten: 10.55.0.9:7947\nfront: {name: f, address: 10.55.0.1:7946}\n",
	} {
		file := filepath.Join(t.TempDir(), "former.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, errs, status := weir(t, "apply", "-f", file)
		if _, section, ok := strings.Cut(errs, "put this into weir.yaml:\n\n"); status != exitFailed || !ok || !strings.HasPrefix(section, want) {
			t.Errorf("status %d, want the section %q: %s", status, want, errs)
		}
	}
}

// A connected but silent partner is shown with the length of the silence.
func TestPartnerState(t *testing.T) {
	for want, p := range map[string]lb.PairStatus{
		"connected":                                {Connected: true},
		"! connected, but silent for 4 s":          {Connected: true, Silent: 4.2},
		"! not connected for 12 s":                 {Silent: 12},
		"! not connected since the agent's start":  {Silent: -1},
		"connected, clients' packets arrive there": {Connected: true, There: true},
	} {
		if got := partnerState(&p); got != want {
			t.Errorf("%+v: %q, want %q", p, got, want)
		}
	}
}

// For a load balancer without its network namespace, status reports the namespace in place of the agent.
func TestPrintGoneLB(t *testing.T) {
	var b strings.Builder
	printLB(&b, lb.Status{Name: "edge", Netns: "4026532000", Flows: 1, Gone: true})
	if text := b.String(); !strings.HasPrefix(text, "load balancer edge in net:[4026532000]: 1 flow, ") || !strings.Contains(text, "\n  ! its network namespace is gone") || strings.Contains(text, "agent") {
		t.Error(text)
	}
}

// Without an agent the weights are unknown. A 0 would mean a drained backend.
func TestPrintLBWithoutAgent(t *testing.T) {
	for agent, want := range map[bool]string{false: "- -", true: "- 0"} { // VIA and WEIGHT
		var b strings.Builder
		printLB(&b, lb.Status{Name: "lb", Agent: agent, Backends: []lb.BackendStatus{{Number: 1, Flows: 11}}})
		if text := strings.Join(strings.Fields(b.String()), " "); !strings.Contains(text, " "+want+" 11 ") {
			t.Errorf("agent %t: %s", agent, b.String())
		}
	}
}

// A device without the load balancer's program is shown with the reason.
func TestPrintDeviceFaults(t *testing.T) {
	var b strings.Builder
	printLB(&b, lb.Status{Name: "lb", Agent: true, Devices: []lb.DeviceFault{{Device: "eth0", Reason: "there is no such interface"}}})
	if !strings.Contains(b.String(), "\n  ! device eth0: there is no such interface: ") {
		t.Error(b.String())
	}
}
