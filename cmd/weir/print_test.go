// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/kernel"
)

// now is the time of all golden tables.
var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) time.Time { return now.Add(-d) }

func verdicts(udp, tcp slots.Verdicts) map[string]slots.Verdicts {
	return map[string]slots.Verdicts{"udp": udp, "tcp": tcp}
}

// telemetry is a service with one slot of each kind.
var telemetry = state.Service{
	Name: "telemetry", Netns: "net:[4026531840]", Inode: 4026531840, Listen: []string{"udp 0.0.0.0:4739", "tcp 0.0.0.0:1790"},
	By: "source", Engine: "sk_lookup", Seed: 42, Buckets: 4096, OnEmpty: "reject",
	Slots: []slots.State{
		{Slot: 0, State: "admitted", Member: "unit nfacctd@0.service", PID: 4711, Since: before(90 * time.Minute), Buckets: 1024,
			Verdicts: verdicts(slots.Verdicts{Steered: 123456}, slots.Verdicts{Steered: 128}),
			Sockets: []slots.Socket{{Listen: "udp4 :4739", Cookie: 1, Queue: 2048, Buffer: 8 << 20, Drops: 3},
				{Listen: "tcp4 :1790", Cookie: 2, Queue: 5, Backlog: 1024}}},
		{Slot: 1, State: "empty", Reason: "process 4712 exited", Member: "cgroup /collectors/1", PID: 4712, Since: before(12 * time.Second), Buckets: 1024,
			Verdicts: verdicts(slots.Verdicts{Steered: 99, Rejected: 7, Dropped: 1}, slots.Verdicts{Rejected: 2})},
		{Slot: 2, State: "empty", Reason: "pidfile /run/nfacctd-2.pid never had all its sockets", Member: "pidfile /run/nfacctd-2.pid", Buckets: 1024},
		{Slot: 3, State: "empty", Reason: "no member is configured", Buckets: 1024},
	},
}

var dns = state.Service{
	Name: "dns", Netns: "net:[4026532000] edge", Listen: []string{"udp [::]:53"}, By: "source", Engine: "sk_lookup", Seed: 0, OnEmpty: "next",
	Slots: []slots.State{{Slot: 0, State: "admitted", Member: "pid 99", PID: 99, Since: before(49 * time.Hour), Buckets: 4096,
		Verdicts: verdicts(slots.Verdicts{Steered: 1}, slots.Verdicts{})}},
}

// replaced is a service with a slot in replacement, and one with a failed successor.
var replaced = state.Service{
	Name: "www", Netns: "net:[4026532000] edge", Listen: []string{"udp [::]:443"}, By: "source", Engine: "sk_lookup", OnEmpty: "next",
	Slots: []slots.State{
		{Slot: 0, State: "admitted", Member: "pid 99", PID: 99, Since: before(time.Minute),
			Draining: &slots.Draining{PID: 98, Since: before(time.Minute), Until: now.Add(time.Minute), Peers: 4, Sessions: 1, Waiting: 2}},
		{Slot: 1, State: "empty", Reason: "process 101 exited", Member: "pid 101",
			Draining: &slots.Draining{PID: 100, Since: before(time.Minute), Until: before(time.Second), Sessions: -1, Back: 7}},
	},
}

func TestPrintStatus(t *testing.T) {
	var b strings.Builder
	printSummary(&b, state.State{})
	b.WriteString("---\n")
	broken := telemetry
	broken.Name, broken.Slots, broken.Problem = "broken", nil, "its engine is missing: weir apply recovers it"
	printSummary(&b, state.State{Services: []state.Service{broken, dns, telemetry}})
	golden(t, "status.golden", b.String())
}

// After the loss of all pins, status does not propose to begin anew.
func TestStatusAfterLoss(t *testing.T) {
	for kind, proposes := range map[kernel.FaultKind]bool{kernel.FaultPins: false, kernel.FaultRoot: false, kernel.FaultAhead: true, "": true} {
		var b strings.Builder
		st := host.Status{}
		if kind != "" {
			st.Faults = []kernel.Fault{{Feature: "steer", Object: "dns", Kind: kind, Text: "all its pins are gone"}}
		}
		summarizeSteer(&b, st, false, now)
		if got := strings.Contains(b.String(), "weir init"); got != proposes {
			t.Errorf("%q: %s", kind, b.String())
		}
	}
}

func TestPrintSteerStatus(t *testing.T) {
	var b strings.Builder
	broken := dns
	broken.Name, broken.Problem = "broken", "queues and drops are not shown: no permission"
	two := 2
	changed := dns
	changed.Name, changed.Bypassed, changed.Drained, changed.MisplacedSessions = "changed", true, []int{0}, &two
	changed.Moved, changed.Placed = map[string]int{"edge1": 2, "192.0.2.7": 0}, map[int]int{1234: 1, 7: 0}
	changed.Copies = &engine.Copies{To: "canary", Copied: 1200, Fragmented: 3}
	printSteer(&b, []state.Service{telemetry, dns, broken, changed, replaced}, now)
	golden(t, "steer-status.golden", b.String())
}

func TestPrintWhere(t *testing.T) {
	var b strings.Builder
	other := 3
	printWhere(&b, []state.Assignment{
		{Address: netip.MustParseAddr("192.0.2.7"), Bucket: 17, Slot: 0, Admitted: true, PID: 4711, Member: "unit nfacctd@0.service"},
		{Address: netip.MustParseAddr("2001:db8::1"), Bucket: 4095, Slot: 1},
		{Address: netip.MustParseAddr("192.0.2.8"), Bucket: 0, Slot: 2, Instead: &other, PID: 4714, Member: "pid 4714"},
		{Address: netip.MustParseAddr("192.0.2.10"), Device: "edge1", Bucket: 5, Slot: 2, Moved: true, Admitted: true, PID: 4714, Member: "pid 4714"},
		{Address: netip.MustParseAddr("192.0.2.9"), Bucket: 1, Slot: 9, Admitted: true}, // simulated
	})
	golden(t, "where.golden", b.String())
}

func TestPrintExplanation(t *testing.T) {
	var b strings.Builder
	printExplanation(&b, &explain.Explanation{Proto: "udp", From: "192.0.2.7:2055", To: "10.0.0.1:4739", Netns: "net:[4026531840]", Steps: []explain.Step{
		{Step: "connected sockets", Text: "none has these addresses"},
		{Step: "sk_lookup", Text: "foreign programs run there too", Warning: true},
	}, Result: "slot 0: process 4711 (nfacctd), at 0.0.0.0:4739"})
	golden(t, "explain.golden", b.String())
}

func TestPrintResets(t *testing.T) {
	var b strings.Builder
	one := 1
	s := state.Session{Remote: netip.MustParseAddrPort("192.0.2.7:40000"), From: &one, Slot: 0, Device: "edge1"}
	gone := state.Session{Remote: netip.MustParseAddrPort("[2001:db8::7]:40000"), Slot: 2}
	printReset(&b, reset.Reset{Service: "telemetry", Session: s, Done: 1, Of: 2})
	printReset(&b, reset.Reset{Service: "telemetry", Session: gone, Done: 2, Of: 2, Err: reset.ErrCannotReset})
	printReset(&b, reset.Reset{Service: "telemetry", Session: gone, Handed: true})
	printForeseen(&b, func(service string, s state.Session) bool { return s.Slot == 2 }, steer.Foreseen{Service: "telemetry", Sessions: []state.Session{s, gone}}, steer.Foreseen{Service: "dns", Problem: "its seed is drawn at its creation"})
	golden(t, "resets.golden", b.String())
}

func TestPrintDevices(t *testing.T) {
	var b strings.Builder
	printDevices(&b, []state.Device{
		{Address: netip.MustParseAddr("192.0.2.7"), Slot: 0, Last: before(1500 * time.Millisecond), UDP: 123456, Rate: 1234.56, Connects: 2, Sessions: 1, Bytes: 5 << 30},
		{Address: netip.MustParseAddr("192.0.2.10"), Name: "edge1", Slot: -1, Last: before(time.Second), UDP: 2},
		{Address: netip.MustParseAddr("192.0.2.8"), Slot: 3, Last: before(6 * time.Minute), UDP: 1, Rate: 0},
		{Address: netip.MustParseAddr("2001:db8::1"), Slot: 1, Connects: 1, Bytes: 1023},
	}, now)
	printDevices(&b, nil, now)
	golden(t, "devices.golden", b.String())
}

func TestPrintDoctor(t *testing.T) {
	var b strings.Builder
	printDoctor(&b, host.Diagnosis{Kernel: "5.10.0-46-cloud-amd64", User: "uid 1000", Findings: []host.Finding{
		{Feature: "steer", Check: "sk_lookup programs", Since: "5.9", Level: "missing", Text: "operation not permitted: run as root"},
		{Feature: "steer", Check: "sock_diag for TCP and UDP", Since: "3.3", Level: "ok"},
		{Feature: "steer", Check: "SO_NETNS_COOKIE", Since: "5.14", Level: "note", Text: "protocol not available", For: "telling namespaces apart", Optional: true},
		{Feature: "steer", Check: "telemetry", Level: "warning", Text: "all its traffic comes from 192.0.2.1", Remedy: "remove the proxy"},
		{Feature: "backend", Check: "backend s1", Level: "warning", Text: "the keeper does not answer its agent", Remedy: "run weir serve"},
	}})
	golden(t, "doctor.golden", b.String())
}

func TestPrintTemplates(t *testing.T) {
	var b strings.Builder
	printTemplates(&b, templates.TemplateState{Service: "telemetry", Refused: 7, Exporters: []templates.Exporter{
		{Address: netip.MustParseAddrPort("192.0.2.7:50000"), Protocol: "ipfix", Domain: 65536, Slot: 2, Last: before(time.Second), Learnt: before(3 * time.Hour),
			Replayed: before(5 * time.Minute), Replays: 2, Templates: []templates.Template{{ID: 256, Bytes: 84}, {ID: 257, Bytes: 20, Options: true}}},
		{Address: netip.MustParseAddrPort("[2001:db8::1]:2055"), Protocol: "netflow9", Learnt: before(time.Minute), Templates: []templates.Template{{ID: 260, Bytes: 12}}},
	}}, now)
	golden(t, "templates.golden", b.String())
}

// A command fails if its output is lost, also with text output.
func TestLostOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	c := command("version")
	var errs strings.Builder
	c.Stdout, c.Stderr = full, &errs
	if err := c.Run(); err == nil || !strings.Contains(errs.String(), "no space left on device") {
		t.Errorf("%v: %s", err, &errs)
	}
}

// A change stays in force if its report is lost, and the command says so.
func TestLostOutputOfAChange(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	file := configFile(t, "")
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for args, want := range map[string]struct {
		failed bool
		told   string
	}{
		"--allow-outage": {false, "weir: the change is in force, but its report could not be written: write /dev/stdout: no space left on device\n"},
		"--dry-run":      {true, "weir: write /dev/stdout: no space left on device\n"},
	} {
		c := command("--root", s.root, "apply", "-f", file, args)
		var errs strings.Builder
		c.Stdout, c.Stderr = full, &errs
		if err := c.Run(); (err != nil) != want.failed || !strings.HasSuffix(errs.String(), want.told) {
			t.Errorf("apply %s: %v, and it says\n%s", args, err, &errs)
		}
	}
	s.run(0, `nothing to change\n`, "apply", "-f", file)
}

func TestRerouteStatusOfNothing(t *testing.T) {
	s := session{t, root(t)}
	s.run(0, `\{\n  "paths": \[\],\n  "sessions": \[\]\n\}\n`, "reroute", "status", "--json")
}
