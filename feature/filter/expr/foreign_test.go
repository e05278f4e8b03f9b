// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"regexp"
	"strings"
	"testing"
)

var fieldNames = regexp.MustCompile(`[a-z0-9]+(\.[a-z_]+)+`)

// No existing field is foreign, and hints name existing fields.
func TestForeign(t *testing.T) {
	for name, hint := range foreign {
		if byName[name] != nil {
			t.Errorf("%s is a field of weir, not a foreign one", name)
		}
		for _, w := range fieldNames.FindAllString(hint, -1) {
			if byName[w] == nil {
				t.Errorf("the hint for %s names %s, not a field", name, w)
			}
		}
	}
}

// Other tools' names lead to an existing field of the protocol, and are no field names themselves.
// No name is suggested a field of both directions unless it means both.
func TestMeant(t *testing.T) {
	last := map[string]bool{}
	for name := range byName {
		_, rest, _ := strings.Cut(name, ".")
		last[rest] = true
	}
	for name, fields := range foreignFields {
		for _, f := range fields {
			if !last[f] {
				t.Errorf("%s means %s, not a field of any protocol", name, f)
			}
		}
		if between.Replace(name) != name {
			t.Errorf("%s is never found", name)
		}
	}
	for other, proto := range foreignProtos {
		if byName[proto] == nil && proto != "net" {
			t.Errorf("%s means %s, not a protocol", other, proto)
		}
	}
	for _, proto := range []string{"ip", "ipv6", "tcp", "udp", "net", "eth"} {
		for _, name := range []string{"dport", "sport", "saddr", "daddr", "dprt", "sprt", "dadr", "sadr", "destport", "srcadr", "dst_ip", "dst", "src"} {
			e := (&parser{}).unknown(token{kind: word, s: proto + "." + name})
			if f := byName[e.Suggestion]; f != nil && (strings.HasSuffix(f.Name, ".port") || strings.HasSuffix(f.Name, ".addr")) {
				t.Errorf("%s.%s: the suggestion %s matches both directions", proto, name, f.Name)
			}
		}
	}
}
