// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/internal/strictyaml"
)

func parse(text string) (Config, error) {
	var file struct {
		Reroute []Path `yaml:"reroute"`
	}
	if err := strictyaml.Decode("weir.yaml", []byte(text), &file); err != nil {
		return Config{}, err
	}
	c := Config{Paths: file.Reroute}
	return c, errors.Join(c.Validate()...)
}

const probe = "probe: {id: 7, peer: fc00:2::bf, via: fd00:12::2, source: fd00:12::1, function: fc00:1::bf, key_file: /k}"

func TestConfig(t *testing.T) {
	c, err := parse(`
reroute:
  - name: a
    interface: eth1
    prefix: 2001:db8:d::/64
    segments: [fc00:3::1, fc00:2::d6]
    hold: 2s
    ` + probe + `
  - name: b
    interface: eth1
    repairs: [{segments: [fc00:3::1], interface: eth2}, {interface: eth3, via: "fe80::3"}]
  - name: c
    netns: blue
    interface: eth9
    ` + probe + `
`)
	if err != nil {
		t.Fatal(err)
	}
	p := c.protection()
	if len(p.Paths) != 2 || len(p.Paths[0].Prefixes) != 1 || len(p.Paths[0].Repairs[0].Segments) != 2 || len(p.Paths[1].Repairs) != 2 || p.Paths[0].Hold != 2*time.Second {
		t.Errorf("%+v", p)
	}
	l := c.liveness()
	if len(l) != 2 || l[1].Netns != "blue" || l[0].Sessions[0].Interval != 10*time.Millisecond || l[0].Sessions[0].Multiplier != 3 || l[0].Sessions[0].Device != "eth1" {
		t.Errorf("%+v", l)
	}
}

// Sessions of bfdd judge the links of paths with bfd.frr. Weir's own sessions are separate.
func TestConfigJudged(t *testing.T) {
	c, err := parse(`
reroute:
  - {name: frr, frr: "unix:/run/frr/dplane"}
  - {name: a, interface: e, bfd: {peer: "fe80::2", frr: true}, segments: [fc00::1]}
  - {name: b, interface: f, bfd: {peer: 10.0.0.2}}
  - {name: c, interface: f, bfd: {peer: 10.0.0.3, observe: true}}
`)
	if err != nil {
		t.Fatal(err)
	}
	n := c.neighbours()
	if len(n) != 1 || n[0].FRR == "" || len(n[0].Sessions) != 2 || len(n[0].Evaluated) != 1 || n[0].Evaluated[0] != (peers.Evaluated{Name: "a", Device: "e", Peer: netip.MustParseAddr("fe80::2")}) {
		t.Errorf("%+v", n)
	}
}

// Errors carry their position.
func TestConfigErrors(t *testing.T) {
	for _, c := range []struct{ path, want string }{
		{"interface: e, segments: [fc00::1]", `weir.yaml:2:5: reroute.: use a name of letters`},
		{"name: a, interface: e", `weir.yaml:2:5: reroute.a: neither a probe nor a way around`},
		{"name: a, interface: e, hold: 1s, " + probe, `weir.yaml:2:5: reroute.a: prefixes, hold and shadow need repairs`},
		{"name: a, segments: [fc00::1]", `weir.yaml:2:5: reroute.a: interface ""`},
		{"name: a, interface: e, segments: [fc00::1], repairs: [{segments: [fc00::2]}]", `use one of the two`},
		{"name: a, interface: e, prefix: 2001:db8::/32, prefixes: [2001:db8::/32], segments: [fc00::1]", `use one of the two`},
		{"name: a, interface: e, segments: [10.0.0.1]", `segment "10.0.0.1": want a global IPv6 address`},
		{"name: a, interface: e, segmentz: [fc00::1]", `unknown key "segmentz"; did you mean "segments"?`},
		{"name: a, interface: e, segments: [fc00::x]", `weir.yaml:2:`},
		{"name: a, interface: e, probe: {id: 7, peer: fc00:2::bf, source: fd00:12::1, function: fc00:1::bf}", `weir.yaml:2:36: reroute.a.probe: key_file:`},
		{"name: a, interface: e, probe: {peer: fc00:2::bf, source: fd00:12::1, function: fc00:1::bf, key_file: /k}", `reroute.a.probe: id: 0 is not allowed`},
		{"name: a, interface: e, " + strings.Replace(probe, "id: 7", "id: 7, interval: 100us", 1), `reroute.a.probe: interval: 100µs`},
		{"name: a, interface: e, " + strings.Replace(probe, "id: 7", "id: 7, mode: both", 1), `mode: "both"`},
		{"name: a, interface: e, " + probe + "}\n  - {name: a, interface: f, segments: [fc00::1]", `two paths have this name`},
		{"name: a, interface: e, " + probe + "}\n  - {name: b, interface: e, " + strings.Replace(probe, "id: 7", "id: 8", 1), `judges device e already`},
		{"name: a, interface: e, " + probe + "}\n  - {name: b, interface: f, " + probe, `session "a" has 7 too`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2}, " + probe, `probe and bfd: use one of the two`},
		{"name: a, interface: e, bfd: {interval: 50ms}", `weir.yaml:2:34: reroute.a.bfd: peer: say the neighbour's address`},
		{"name: a, interface: e, bfd: {peer: fe80::2%e}", `reroute.a.bfd: peer: without %e`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2, local: fd00::1}", `of different families`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2, interval: 10us}", `interval: 10µs: use 1ms to 1m0s`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2, echo: 10us}", `echo: 10µs: use 1ms to 1m0s`},
		{"name: a, interface: e, bfd: {peer: fe80::2, echo: 10ms}", `echo: nothing is forwarded to a link-local address`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2, key_id: 3}", `need a file with the key`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2, key_file: /k, auth: md5}", `auth: "md5": use keyed-sha1 or meticulous-sha1`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2, frr: true}", `reroute.a.bfd: frr: the address of the bfdd`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2, frr: true, interval: 50ms}", `frr allows peer only`},
		{"name: a, interface: e, bfd: {frr: true}", `peer: say the neighbour's address`},
		{"name: a, interface: e, bfd: {peer: 10.0.0.2}}\n  - {name: b, interface: e, bfd: {peer: 10.0.0.3}", `weir.yaml:3:34: reroute.b.bfd: a judges interface e already`},
		{"name: a, interface: e, " + probe + "}\n  - {name: b, interface: e, bfd: {peer: 10.0.0.3}", `a judges interface e already`},
		{"name: a, bfd: {peer: 10.0.0.2}", `interface "": name the link`},
		{"name: frr, frr: /run/frr/dplane", `frr: "/run/frr/dplane": want unix:PATH`},
		{`name: frr, frr: "unix:/run/x", interface: e`, `frr is for all links of a bfdd`},
		{`name: frr, frr: "unix:/run/x"}` + "\n  - {" + `name: other, frr: "unix:/run/y"`, `frr configures the bfdd of this network namespace already`},
	} {
		_, err := parse("reroute:\n  - {" + c.path + "}\n")
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "weir.yaml:") {
			t.Errorf("%s:\n  %v\nwant %s", c.path, err, c.want)
		}
	}
}
