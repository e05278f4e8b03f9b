// SPDX-License-Identifier: Apache-2.0

package forwarding

import (
	"net/netip"
	"os"
	"os/exec"
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

// TestInvalidDrops loads rulesets of nft. A rule that drops invalid packets is a finding, unless the answers of all
// services pass it.
func TestInvalidDrops(t *testing.T) {
	nstest.NeedRoot(t)
	nft, err := exec.LookPath("nft")
	if err != nil {
		t.Fatal("want nft (package nftables): ", err)
	}
	c := &spec.Config{Name: "edge", Services: map[string]spec.ServiceConfig{
		"a": {Listen: []service.Listen{{Prefix: netip.MustParsePrefix("192.0.2.1/32")}}},
		"b": {Listen: []service.Listen{{Prefix: netip.MustParsePrefix("198.51.100.7/32")}}},
	}}
	ns := nstest.NewNetns(t)
	const forward = "chain f { type filter hook forward priority 0; "
	for rules, found := range map[string]bool{
		"":                                   false,
		forward + "ct state invalid drop; }": true,
		forward + "ct state invalid counter reject; }":                                                                                                 true,
		forward + "ct state invalid,untracked drop; }":                                                                                                 true,
		forward + "ct state vmap { invalid : drop, established : accept, related : accept }; }":                                                        true,
		forward + "ct state { invalid, new } drop; }":                                                                                                  true,
		forward + "ct state established,related accept; drop; }":                                                                                       false,
		forward + "ct state invalid accept; }":                                                                                                         false,
		"chain i { type filter hook input priority 0; ct state invalid drop; }":                                                                        false, // the host's own
		forward + "ip saddr 192.0.2.1 accept; ct state invalid drop; }":                                                                                true,  // the other service
		forward + "ip saddr 192.0.2.1 accept; ip saddr 198.51.100.0/24 accept; ct state invalid drop; }":                                               false,
		forward + "ip saddr 192.0.2.0/25 accept; ip saddr 198.51.100.7 counter accept; ct state invalid drop; }":                                       false,
		forward + "ip saddr { 192.0.2.1, 198.51.100.7 } accept; ct state invalid drop; }":                                                              false,
		forward + "ct state invalid drop; ip saddr { 192.0.2.1, 198.51.100.7 } accept; }":                                                              true,
		forward + "ip daddr { 192.0.2.1, 198.51.100.7 } accept; ct state invalid drop; }":                                                              true,
		"chain p { type filter hook prerouting priority raw; ip saddr { 192.0.2.1, 198.51.100.7 } notrack; }; " + forward + "ct state invalid drop; }": false,
	} {
		in(t, ns, func() error {
			n := exec.Command(nft, "-f", "-")
			n.Stdin = strings.NewReader("flush ruleset\ntable inet firewall {\n" + strings.ReplaceAll(rules, "; }", "; }\n") + "\n}\n")
			if out, err := n.CombinedOutput(); err != nil {
				t.Errorf("%s: %v: %s", rules, err, out)
			}
			var texts []string
			for _, f := range Findings(c) {
				if strings.Contains(f.Text, "state invalid (nft table firewall, chain f") && strings.Contains(f.Remedy, "ip saddr 192.0.2.1 accept") {
					texts = append(texts, f.Text)
				}
			}
			if (len(texts) > 0) != found {
				t.Errorf("%s: %q, want a finding: %t", rules, texts, found)
			}
			return nil
		})
	}
	six := &spec.Config{Name: "edge", Services: map[string]spec.ServiceConfig{"six": {Listen: []service.Listen{{Prefix: netip.MustParsePrefix("2001:db8::1/128")}}}}}
	in(t, ns, func() error {
		if out, err := exec.Command(nft, "flush ruleset; table ip firewall { "+forward+"ct state invalid drop; }; }").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		for _, f := range Findings(six) {
			if strings.Contains(f.Text, "state invalid") {
				t.Errorf("a rule for IPv4 concerns a service of IPv6: %s", f.Text)
			}
		}
		return nil
	})
}

func in(t *testing.T, ns *netns.Handle, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}
