// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// atDevices has an instance of every feature that attaches to devices.
const atDevices = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739]
    steer: {slots: 1}
    members: [{slot: 0, pid: %d}]
    guard: {limit: 20kpps, interfaces: [d1]}
  other: # %d
    listen: [udp 0.0.0.0:4740]
    steer: {slots: 1}
filter:
  - {name: tcx, hook: tcx, interfaces: [d0], rules: [{match: 'udp.dstport == 9', action: drop}]}
  - {name: xdp, hook: xdp-generic, interfaces: [d0], rules: [{match: 'udp.dstport == 9', action: drop}]}
reroute:
  - {name: core, interface: d0, bfd: {peer: "fd00:12::2", interval: 50ms, multiplier: 3}, repairs: [{segments: ["fc00:3::e"], interface: d1, via: "fd00:13::3"}]}
  - {name: probed, interface: d1, repairs: [{segments: ["fc00:3::1"], interface: d0, via: "fd00:12::3"}], probe: {mode: echo, id: 7, peer: "fc00:3::1", source: "fd00:13::1", via: "fd00:13::3", key_file: %q}}
`

// deviceFailures are the reports about the instances of atDevices: for a missing device, for a recreated one, and the
// latter's step in the plan.
var deviceFailures = []struct{ feature, object, absent, again, plan string }{
	{"guard", "telemetry", "there is no interface d1", "not attached at d1", "guard of service telemetry"},
	{"filter", "tcx", "there is no interface d0", "not attached", "attach filter tcx"},
	{"filter", "xdp", "there is no interface d0", "not attached", "attach filter xdp"},
	{"reroute", "path core", "there is no interface d0", "nothing is attached to d0", "attach reroute of path core"},
	{"reroute", "session probed", "there is no interface d1", "device d1 was recreated", "session probed: device d1 was recreated"},
	{"reroute", "BFD session core", "there is no interface d0", "device d0 was recreated", "session core: device d0 was recreated"},
	{"lb", "load balancer lb", "device d1 of namespace", "no program is attached", "lb: d1: no program is attached: weir serve attaches"},
	{"backend", "quarantine of netns", "device d0: there is no such interface", "device d0: no program is attached", "handoff.backend: d0: no program is attached: weir serve attaches"},
}

// countFromBoot makes failures count from boot on.
func countFromBoot(t *testing.T) {
	was := bootTime
	bootTime = 0
	t.Cleanup(func() { bootTime = was })
}

// page returns the answer of a weir serve without a file.
func (w world) page(path string) (int, string) {
	r := httptest.NewRecorder()
	w.public(nil, ServeOptions{}, nil, nil, nil).ServeHTTP(r, httptest.NewRequest("GET", path, nil))
	return r.Code, r.Body.String()
}

// judged waits until doctor, /healthz and weir_healthy report the same failures, and check accepts them. They are read
// at different times: on a busy machine a session may change or a loop stall in between.
func (w world) judged(check func([]Finding) error) {
	w.t.Helper()
	nstest.Eventually(w.t, func() error {
		found, err := w.failures()
		if err != nil {
			return err
		}
		return check(found)
	})
}

// none is a check for judged.
func none(found []Finding) error {
	if len(found) > 0 {
		return fmt.Errorf("doctor calls failures %+v", found)
	}
	return nil
}

// failures returns the failures of doctor. err describes a different report of /healthz or weir_healthy.
func (w world) failures() (out []Finding, err error) {
	for _, f := range w.Doctor(w.t.Context()).Findings {
		if f.Level == "failure" {
			out = append(out, f)
		}
	}
	code, body := w.page("/healthz")
	_, metrics := w.page("/metrics")
	wantCode, wantMetric := 200, "weir_healthy 1"
	if len(out) > 0 {
		wantCode, wantMetric = 503, "weir_healthy 0"
	}
	if code != wantCode || !strings.Contains(metrics, wantMetric) {
		return nil, fmt.Errorf("no %s, or /healthz: %d %s; doctor calls failures %+v", wantMetric, code, body, out)
	}
	if len(out) == 0 {
		return nil, nil
	}
	lines := strings.Split(strings.TrimSpace(body), "\n")
	for _, f := range out {
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, f.Text) }) {
			return nil, fmt.Errorf("/healthz does not tell of %+v: %s", f, body)
		}
	}
	for _, l := range lines {
		if !slices.ContainsFunc(out, func(f Finding) bool { return strings.Contains(l, f.Text) }) {
			return nil, fmt.Errorf("doctor does not call it a failure: %s", l)
		}
	}
	return out, nil
}

// For a missing device and for a recreated one, every lost attachment is a failure in doctor and /healthz. The plan
// lists the new attachment, and apply makes it.
func TestDevicesMadeAgain(t *testing.T) {
	for name, x := range map[string]struct {
		need kernel.Need
		tcx  bool
	}{"links": {kernel.TCXLink, true}, "filters": {kernel.ClsactFilter, false}} {
		t.Run(name, func(t *testing.T) {
			countFromBoot(t)
			text := atDevices
			if !x.tcx {
				withoutTCX(t)
				text = regexp.MustCompile(`bfd: {[^}]*}, `).ReplaceAllString(text, "")
			}
			ca := peertest.NewAuthority(t)
			cert, key, root := ca.Files("s1")
			cert2, key2, _ := ca.Files("lb")
			needs := []kernel.Need{x.need, kernel.XDPProgram}
			for _, n := range slices.Concat(lb.Needs, backend.Feature{}.Needs(backend.Config{Name: "s1"})) {
				if !n.Optional {
					needs = append(needs, n)
				}
			}
			w, c, _, agents := damagedWorldOf(t, text+fmt.Sprintf(sectionsOfHandoff, cert, key, root, cert2, key2, root), needs...)
			tells := func(again bool) {
				t.Helper()
				p, err := w.Plan(t.Context(), c)
				if err != nil {
					t.Fatal(err)
				}
				plan := fmt.Sprintln(p.Steps, p.Warnings)
				w.judged(func(found []Finding) error {
					for _, d := range deviceFailures {
						want := d.absent
						if again {
							want = d.again
						}
						if !slices.ContainsFunc(found, func(f Finding) bool {
							return f.Feature == d.feature && strings.HasPrefix(f.Check, d.object) && strings.Contains(f.Text, want)
						}) && (x.tcx || !strings.Contains(d.object, "BFD")) {
							return fmt.Errorf("made again %t: no failure of %s %s: %+v", again, d.feature, d.object, found)
						}
					}
					return nil
				})
				for _, d := range deviceFailures {
					if again && !strings.Contains(plan, d.plan) && (x.tcx || !strings.Contains(d.object, "BFD")) {
						t.Errorf("the plan does not tell of %s %s: %s", d.feature, d.object, plan)
					}
				}
			}
			w.judged(none) // all is well
			for _, name := range []string{"d0", "d1"} {
				if l, err := netlink.LinkByName(name); err != nil || netlink.LinkDel(l) != nil {
					t.Fatal(name, err)
				}
			}
			tells(false)
			bootTime = 1 << 62
			if code, body := w.page("/healthz"); code != 200 {
				t.Errorf("interfaces are yet to come after the boot: /healthz: %d %s", code, body)
			}
			bootTime = 0
			makeDevices(t)
			tells(true)
			if _, body := w.page("/metrics"); !strings.Contains(body, `weir_lb_device_faults{lb="lb"} 1`) {
				t.Error("the metrics do not tell of the load balancer's device")
			}
			steps := strings.Join(w.apply(c), "\n")
			for _, want := range []string{"recover guard telemetry: not attached at d1", "attach filter tcx: ", "attach BFD of ", "recover reroute path core: nothing is attached to d0"} {
				if !strings.Contains(steps, want) && (x.tcx || !strings.Contains(want, "BFD")) {
					t.Errorf("apply does not tell that it did %q: %s", want, steps)
				}
			}
			agents.restart(w)
			w.judged(none)
			if steps := w.plan(c); len(steps) > 0 {
				t.Errorf("applied, and the plan is %q", steps)
			}
		})
	}
}

// An apply reports the recovery of an object once it has no failure. It reads the states of its own features.
func TestRecovered(t *testing.T) {
	core, other := Finding{Feature: "reroute", Check: "path core", Text: "nothing is attached to d0"}, Finding{Feature: "guard", Check: "core", Text: "not attached at d0"}
	reworded := core
	reworded.Text = "IPv4 packets by d0 are dropped"
	for name, x := range map[string]struct{ now, want []Finding }{
		"both":           {nil, []Finding{core, other}},
		"in other words": {[]Finding{reworded}, []Finding{other}},
		"neither":        {[]Finding{other, core}, []Finding{}},
	} {
		if got := recovered([]Finding{core, other}, x.now); !slices.Equal(got, x.want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
	s := newSkeletons(t)
	looks := 0
	f := featuretest.New()
	f.Lacks = func(*kernel.Root, instances.Record[featuretest.Item], func(string, netns.ID)) (bool, error) {
		looks++
		return true, nil
	}
	features[len(features)-1] = feature.Declare[[]featuretest.Item, feature.SetState[featuretest.Item, featuretest.View]](f)
	s.apply(s.config("skeleton: [{name: web, cgroup: %s}]\n", s.cgroup))
	looks = 0
	c := s.config("filter: []\n")
	c.Only = []string{"filter"}
	if s.apply(c); looks > 0 {
		t.Errorf("an apply of filters looked %d times for failures of another feature", looks)
	}
}

// Failures that disappear within a moment do not count: a running command may not have attached everything yet. Lasting
// ones are reported, and the plan adds the missing attachments.
func TestPassingFailures(t *testing.T) {
	countFromBoot(t)
	s := newSkeletons(t)
	looks, lasts := 0, false
	f := featuretest.New()
	f.Lacks = func(*kernel.Root, instances.Record[featuretest.Item], func(string, netns.ID)) (bool, error) {
		looks++
		return lasts || looks == 1, nil
	}
	features[len(features)-1] = feature.Declare[[]featuretest.Item, feature.SetState[featuretest.Item, featuretest.View]](f)
	c := s.config("skeleton: [{name: web, cgroup: %s}]\n", s.cgroup)
	s.apply(c)
	looks = 0
	if code, body := s.page("/healthz"); code != 200 || looks != 2 {
		t.Errorf("it passes: /healthz: %d %s after %d looks", code, body, looks)
	}
	lasts = true
	if code, body := s.page("/healthz"); code != 503 || body != "skeleton web: not attached everywhere: run weir serve, or weir apply: both attach it\n" {
		t.Errorf("it lasts: /healthz: %d %s", code, body)
	}
	if steps := s.plan(c); !slices.Equal(steps, []string{"attach skeleton web"}) {
		t.Errorf("plan %q", steps)
	}
}
