// SPDX-License-Identifier: Apache-2.0

package forwarding

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/service"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// TestFindings checks the finding for each setting: it names the family or the interface.
func TestFindings(t *testing.T) {
	nstest.NeedRoot(t)
	c := &spec.Config{Name: "edge", Devices: []string{"lo", "absent"}, Services: map[string]spec.ServiceConfig{
		"four": {Listen: []service.Listen{{Prefix: netip.MustParsePrefix("192.0.2.1/32")}}},
		"six":  {Listen: []service.Listen{{Prefix: netip.MustParsePrefix("2001:db8::1/128")}}},
	}}
	ns := nstest.NewNetns(t)
	set := func(name, value string) {
		t.Helper()
		in(t, ns, func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) })
	}
	for _, x := range []struct{ v4, v6, strict, want string }{
		{"1", "1", "0", ""},
		{"0", "1", "0", "IPv4 packets from lo: answers"},
		{"1", "0", "0", "does not forward IPv6 packets"},
		{"1", "1", "1", "rp_filter is 1 at lo"},
		{"1", "1", "2", ""},
	} {
		set("ipv4/ip_forward", x.v4)
		set("ipv6/conf/all/forwarding", x.v6)
		set("ipv4/conf/all/rp_filter", x.strict)
		in(t, ns, func() error {
			var texts []string
			for _, f := range Findings(c) {
				texts = append(texts, f.Text)
			}
			if got := strings.Join(texts, "\n"); len(texts) > 1 || (x.want == "") != (got == "") || !strings.Contains(got, x.want) {
				t.Errorf("%+v: %s", x, got)
			}
			return nil
		})
	}
}

func in(t *testing.T, ns *netns.Handle, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}
