// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
)

const unlinked = `
services:
  telemetry: {listen: [udp 0.0.0.0:4739], steer: {slots: 1, copy: second}, members: [{slot: 0, pid: %[1]d}]}
  second: {listen: [udp 0.0.0.0:4740], steer: {slots: 1}}
filter:
  - {name: tc, hook: clsact, interfaces: [lo], rules: [{match: 'udp.dstport == 9', action: drop}]}
  - {name: nft, hook: nft, rules: [{match: 'udp.dstport == 9', action: drop}]}
`

// A tc filter and an nftables table have no link. Their loss is reported everywhere, and the next apply or weir serve
// adds them again.
func TestLostFiltersAreTold(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range []kernel.Need{hook.NFTMatch, kernel.ClsactFilter} {
		if err := n.Check(); err != nil {
			t.Skip("need: kernel:", err)
		}
	}
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	c := w.config(unlinked, pid)
	w.apply(c)
	if f, err := w.Faults(t.Context()); err != nil || len(f) != 0 {
		t.Fatalf("faults %v, %v", f, err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	lose := func() {
		t.Helper()
		if err := netlink.QdiscDel(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{LinkIndex: lo.Attrs().Index,
			Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("nft", "delete", "table", "inet", "weir_nft").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	whole := func() bool { f, err := w.Faults(t.Context()); return err == nil && len(f) == 0 }
	lose()
	wants := func(who, text string) {
		t.Helper()
		for _, part := range []string{"filter tc in net:[", "filter nft in net:[", "steer @copy in net:["} {
			if !strings.Contains(text, part) {
				t.Errorf("%s does not tell of %q: %s", who, part, text)
			}
		}
	}
	st, err := w.Reader("/nonexistent").Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wants("status", fmt.Sprint(st.Faults))
	var log nstest.Log
	tellFaults(slog.New(slog.NewTextHandler(&log, nil)), st.Faults, map[string]kernel.Fault{})
	wants("the log", log.String())
	page := func(path string) (int, string) {
		r := httptest.NewRecorder()
		w.public(nil, ServeOptions{}, nil, nil, nil).ServeHTTP(r, httptest.NewRequest("GET", path, nil))
		return r.Code, r.Body.String()
	}
	status, body := page("/healthz")
	if wants("/healthz", body); status != 503 {
		t.Errorf("/healthz: %d", status)
	}
	if _, body := page("/metrics"); !strings.Contains(body, "weir_healthy 0") || !strings.Contains(body, `feature="filter",kind="detached"`) {
		t.Error("the metrics do not tell")
	}
	if d := w.Doctor(t.Context()); !strings.Contains(fmt.Sprint(d.Findings), "nothing runs at nftables table inet weir_nft") {
		t.Error("doctor does not tell")
	}
	w.apply(c)
	if !whole() {
		t.Error("apply did not put them up again")
	}
	w.serve()
	lose()
	nstest.Until(t, "weir serve puts them up again", whole)
}
