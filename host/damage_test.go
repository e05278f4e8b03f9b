// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// damagedInstances are the instances of everyFeature with programs, and the tc filters used by some of them on kernels without tcx.
var damagedInstances = []struct {
	who     string // prefix of kernel.Fault.Who
	linked  bool   // it has links on every kernel
	filters []string
}{
	{who: "steer @lookup", linked: true},
	{who: "steer @reuse"},
	{who: "guard telemetry", linked: true},
	{who: "filter tcx", filters: []string{"weir_filter_tcx"}},
	{who: "filter xdp", linked: true},
	{who: "handoff lb-lb", filters: []string{"weir_lb_in", "weir_lb_out"}},
	{who: "handoff quarantine", filters: []string{"weir_quarantine_in", "weir_quarantine_out"}},
	{who: "reroute @protect", filters: []string{"weir_reroute"}},
	{who: "reroute @liveness", filters: []string{"weir_liveness"}},
}

// forOldKernels is everyFeature without netfilter links (Linux 6.4), and without BFD, which needs tcx (6.6).
var forOldKernels = regexp.MustCompile(`(?m)^  - {name: nf, .*\n|bfd: {[^}]*}, `).ReplaceAllString(everyFeature, "")

// withoutTCX makes the kernel look as if it had no tcx until the test ends.
func withoutTCX(t *testing.T) {
	was := kernel.TCXLink.Probe
	kernel.TCXLink.Probe = func() error { return errors.ErrUnsupported }
	t.Cleanup(func() { kernel.TCXLink.Probe = was })
}

// Any loss of pins, links or tc filters of a feature is reported everywhere within 3 s.
func TestDamageOfEveryFeatureIsTold(t *testing.T) {
	for name, x := range map[string]struct {
		config string
		needs  []kernel.Need
		tcx    bool
	}{
		"links":   {everyFeature, []kernel.Need{kernel.TCXLink, kernel.NetfilterLink}, true},
		"filters": {forOldKernels, []kernel.Need{kernel.ClsactFilter}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if !x.tcx {
				withoutTCX(t)
			}
			w, c, _, agents := damagedWorldOf(t, x.config, x.needs...)
			told := w.teller()
			if d, ahead := w.faults(); len(d)+len(ahead) > 0 {
				t.Fatalf("nothing is damaged, and there are faults: %q, %q", d, ahead)
			}
			for _, i := range damagedInstances {
				if dir := w.dirOf(i.who); i.linked || x.tcx {
					w.detachAll(dir, i.who, told)
				}
				if !x.tcx && len(i.filters) > 0 {
					lost := w.deleteFilters(i.filters)
					told(i.who, "filter "+lost[0]+" is missing", "detached")
				}
			}
			w.recovered(c, nil, "detached")
			for _, i := range damagedInstances {
				pins, _ := filepath.Glob(filepath.Join(w.dirOf(i.who), "map_*"))
				if err := os.Remove(pins[0]); err != nil {
					t.Fatal(err)
				}
				told(i.who, "pins are gone: "+filepath.Base(pins[0]), "pins")
			}
			w.recovered(c, agents, "pins gone")
		})
	}
}

// dirOf returns the directory of the instance with this prefix.
func (w world) dirOf(who string) string {
	w.t.Helper()
	all, err := w.Root.Instances("")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, i := range all {
		if strings.HasPrefix(i.Feature+" "+i.Name, who) {
			return filepath.Join(w.Root.Path(), i.Scope, i.Feature, i.Name)
		}
	}
	w.t.Fatalf("there is no instance %s: %v", who, all)
	return ""
}

// detachAll detaches the detachable links of an instance.
func (w world) detachAll(dir, who string, told func(who, text, kind string)) {
	w.t.Helper()
	pins, _ := filepath.Glob(filepath.Join(dir, "link_*"))
	for _, pin := range pins {
		rel, _ := filepath.Rel(w.Root.Path(), pin)
		if w.detach(rel) {
			told(who, filepath.Base(pin)+" is detached", "detached")
			return
		}
	}
	if len(pins) > 0 && !strings.HasPrefix(who, "steer @reuse") { // its links are tracepoints
		w.t.Errorf("%s has no link that can be detached: %q", who, pins)
	}
}

// deleteFilters deletes all tc filters with these names, like tc filter del, and returns the found ones.
func (w world) deleteFilters(names []string) (found []string) {
	w.t.Helper()
	all, err := dump.LinkList()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, l := range all {
		for _, side := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
			filters, _ := dump.FilterList(l, side) // a device without the qdisc has none
			for _, f := range filters {
				b, ok := f.(*netlink.BpfFilter)
				if !ok || !slices.Contains(names, b.Name) {
					continue
				}
				if err := netlink.FilterDel(f); err != nil {
					w.t.Fatal(err)
				}
				found = append(found, b.Name)
			}
		}
	}
	if len(found) == 0 {
		w.t.Fatalf("no device has a filter %q", names)
	}
	return found
}

// teller returns a check that a fault is reported everywhere: by the log within 3 s, and by the others when asked. The
// log belongs to a weir serve without repairs.
func (w world) teller() func(who, text, kind string) {
	var log nstest.Log
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = w.watchHealth(ctx, slog.New(slog.NewTextHandler(&log, nil)))
	}()
	w.t.Cleanup(func() { cancel(); <-ended })
	page := func(path string) string {
		r := httptest.NewRecorder()
		w.public(nil, ServeOptions{}, nil, nil, nil).ServeHTTP(r, httptest.NewRequest("GET", path, nil))
		return fmt.Sprint(r.Code, " ", r.Body)
	}
	return func(who, text, kind string) {
		w.t.Helper()
		began := time.Now()
		nstest.Until(w.t, "the log tells of "+who, func() bool { return log.Find(regexp.MustCompile(`err="[^"\n]*`+regexp.QuoteMeta(text))) != nil })
		d := time.Since(began)
		began = time.Now()
		w.faults()
		if look := time.Since(began); d > 3*time.Second+10*look { // negligible unless the machine is busy
			w.t.Errorf("the log told of %s after %s; to look takes %s", who, d, look)
		}
		fault := regexp.MustCompile(regexp.QuoteMeta(who) + `[^\n]*` + regexp.QuoteMeta(text))
		st, err := w.Reader("/nonexistent").Status(w.t.Context())
		if err != nil {
			w.t.Fatal(err)
		}
		var doctor string
		for _, f := range w.Doctor(w.t.Context()).Findings {
			doctor += fmt.Sprintln(f.Feature, f.Check, f.Text, f.Remedy)
		}
		feature, object, _ := strings.Cut(who, " ")
		for place, x := range map[string]struct {
			says string
			want *regexp.Regexp
		}{
			"status":   {fmt.Sprintln(st.Faults), fault},
			"doctor":   {doctor, fault},
			"/healthz": {page("/healthz"), regexp.MustCompile(`(?s)^503 .*` + fault.String())},
			"/metrics": {page("/metrics"), regexp.MustCompile(fmt.Sprintf(`weir_faults{feature=%q,kind=%q,object="%s[^"]*"} [1-9]`, feature, kind, object))},
		} {
			if !x.want.MatchString(x.says) {
				w.t.Errorf("%s does not tell that of %s %s: %s", place, who, text, x.says)
			}
		}
	}
}

// recovered checks that apply, and restarted agents if given, leave no damage.
func (w world) recovered(c *Config, a *agents, what string) {
	w.t.Helper()
	w.apply(c)
	if a != nil {
		a.restart(w)
	}
	if d, _ := w.faults(); len(d) > 0 {
		w.t.Errorf("%s, and applied: there is still %q", what, d)
	}
}

// Deleting a qdisc removes all its filters, and a foreign filter may come before weir's.
func TestFiltersOfOthersAreTold(t *testing.T) {
	withoutTCX(t)
	w, c, _, _ := damagedWorldOf(t, forOldKernels, kernel.ClsactFilter)
	d0, err := netlink.LinkByName("d0")
	if err != nil {
		t.Fatal(err)
	}
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "theirs", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer pass.Close()
	if err := (kernel.Clsact{Ifindex: d0.Attrs().Index, Name: "theirs", Priority: 2}).Attach(pass); err != nil {
		t.Fatal(err)
	}
	damage, ahead := w.faults()
	if told := strings.Join(ahead, "\n"); len(damage) > 0 || len(ahead) != 1 || !strings.Contains(told, "handoff quarantine") ||
		!strings.Contains(told, "filter \"theirs\" of priority 2 runs at tc ingress of d0 before weir's") {
		t.Errorf("a filter of priority 2 is told so: %q, and damage %q", ahead, damage)
	}
	if err := netlink.QdiscDel(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{LinkIndex: d0.Attrs().Index,
		Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}); err != nil {
		t.Fatal(err)
	}
	damage, ahead = w.faults()
	told := strings.Join(damage, "\n")
	for _, want := range []string{"reroute @protect", "handoff quarantine"} {
		if !strings.Contains(told, want) {
			t.Errorf("%s is not told: %s", want, told)
		}
	}
	if len(ahead) > 0 {
		t.Errorf("what is gone is told to be ahead: %q", ahead)
	}
	w.recovered(c, nil, "the qdisc of d0 is gone")
}
