// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// TestListenAhead checks that a plan warns of a listen address on no interface. If the agent works
// at another address, the plan refuses the change. The agent runs in any case. Its health reports
// the address, and agents connect once an interface has it.
func TestListenAhead(t *testing.T) {
	sc := newScene(t)
	sc.f.Close()
	root := kernel.OpenRoot(nstest.BPFFS + "/" + t.Name())
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	ca := peertest.NewAuthority(t)
	text := fileOf(ca, sc.devices, "register: true\n")
	ahead := func(listen string) string {
		return strings.Replace(text, "listen: 10.2.0.1:7946", "listen: "+listen, 1)
	}
	for _, listen := range []string{"10.2.0.77:7946", `"[fd77::77]:7946"`} {
		if p := sc.plan(t, root, ahead(listen)); len(p.Outages) > 0 || !strings.Contains(strings.Join(p.Warnings, "\n"), "no interface has ") {
			t.Errorf("%s: outages %q, warnings %q", listen, p.Outages, p.Warnings)
		}
	}
	for _, listen := range []string{"10.2.0.1:7946", "0.0.0.0:7946", "'[::]:7946'", "127.0.0.9:7946", "':7946'", "localhost:7946"} {
		if p := sc.plan(t, root, ahead(listen)); len(p.Outages) > 0 || strings.Contains(strings.Join(p.Warnings, "\n"), "listen") {
			t.Errorf("%s: outages %q, warnings %q", listen, p.Outages, p.Warnings)
		}
	}
	sc.applies(t, root, text)
	if p := sc.plan(t, root, ahead("10.2.0.77:7946")); len(p.Steps) != 1 || len(p.Outages) != 1 || !strings.Contains(p.Outages[0], "no interface has 10.2.0.77, and agents connect to 10.2.0.1:7946 now") {
		t.Errorf("steps %v, outages %q", p.Steps, p.Outages)
	}
	absent := func() (out string) {
		do(t, sc.middle, func() error {
			st, err := Feature{}.State(t.Context(), root)
			for _, f := range st.Failures() {
				out += f.Text + "\n"
			}
			return err
		})
		return out
	}
	if f := absent(); strings.Contains(f, "listen") {
		t.Errorf("its address is there, failures %q", f)
	}
	sc.applies(t, root, ahead("10.2.0.77:7946"))
	stop := running(t, sc, root, ahead("10.2.0.77:7946"))
	defer stop()
	status(t, root, func(s Status) bool { return s.Agent })
	if f := absent(); !strings.Contains(f, "lb.listen is 10.2.0.77:7946, and no interface has 10.2.0.77: no agent connects") {
		t.Errorf("its address is absent, failures %q", f)
	}
	do(t, sc.middle, func() error {
		out, err := exec.Command("ip", "address", "add", "10.2.0.77/32", "dev", "h1").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if f := absent(); strings.Contains(f, "listen") {
		t.Errorf("its address has come, failures %q", f)
	}
	registerTwoAt(t, sc, ca, "10.2.0.77:7946")
	status(t, root, func(s Status) bool { return len(s.Backends) == 1 && s.Backends[0].Connected })
}
