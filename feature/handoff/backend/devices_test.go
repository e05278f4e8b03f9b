// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/internal/nstest"
)

// TestDeviceMadeAgain checks that a running agent attaches the quarantine to a recreated interface. While it is
// missing the agent continues, and the state reports it.
func TestDeviceMadeAgain(t *testing.T) {
	w := newNetwork(t, 1, at4)
	s := w.servers[0]
	s.keep()
	cert, key, signers := w.ca.Files("s1")
	w.play(s.ns, "server", fmt.Sprintf(`
name: s1
number: 1
address: 10.2.0.2
listen: 127.0.0.1:7947
tls: {certificate: %s, key: %s, ca: %s}
lb: {address: 10.2.0.1:7946}
devices: [w0]
keeper: %s
`, cert, key, signers, s.keeper))
	w.eventually("the agent runs", func() bool { return s.status().Backend == "s1" })
	failures := func() (out []string) {
		st, err := Feature{}.State(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range st.Failures() {
			out = append(out, f.Text)
		}
		return out
	}
	if got := failures(); len(got) > 0 {
		t.Fatalf("the device is there: %q", got)
	}
	w.in(s.ns, func() error {
		l, err := netlink.LinkByName("w0")
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	})
	if got := failures(); len(got) != 1 || !strings.Contains(got[0], "device w0: there is no such interface") {
		t.Errorf("the device is gone: %q", got)
	}
	if st := s.status(); st.Backend != "s1" {
		t.Errorf("the agent does not answer without its device: %+v", st)
	}
	nstest.Cable(t, s.ns, "w0", w.middle, "s1")
	nstest.Eventually(t, func() error {
		if all := quarantine.DeviceFaults(w.root, quarantine.Instance(s.ns)); len(all) > 0 {
			return fmt.Errorf("the device was made again: %+v", all)
		}
		return nil
	})
	w.eventually("the agent runs again", func() bool { return s.status().Backend == "s1" })
}
