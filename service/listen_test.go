// SPDX-License-Identifier: Apache-2.0

package service

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func parse(t testing.TB, s string) Listen {
	t.Helper()
	l, err := ParseListen(s)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestParseListen(t *testing.T) {
	for s, want := range map[string]struct {
		proto     uint8
		v4, v6    bool
		prefix    string // "" for every address of both families
		port      uint16
		endpoints string
	}{
		"udp 0.0.0.0:4739":         {unix.IPPROTO_UDP, true, false, "0.0.0.0/0", 4739, "udp4 :4739"},
		"tcp [::]:1790":            {unix.IPPROTO_TCP, true, true, "", 1790, "tcp4 :1790, tcp6 :1790"},
		"tcp6 [::]:1790":           {unix.IPPROTO_TCP, false, true, "::/0", 1790, "tcp6 :1790"},
		"tcp6 :1790":               {unix.IPPROTO_TCP, false, true, "::/0", 1790, "tcp6 :1790"},
		"udp4 :4739":               {unix.IPPROTO_UDP, true, false, "0.0.0.0/0", 4739, "udp4 :4739"},
		"udp4 *:4739":              {unix.IPPROTO_UDP, true, false, "0.0.0.0/0", 4739, "udp4 :4739"},
		"udp :4739":                {unix.IPPROTO_UDP, true, true, "", 4739, "udp4 :4739, udp6 :4739"},
		"udp *:4739":               {unix.IPPROTO_UDP, true, true, "", 4739, "udp4 :4739, udp6 :4739"},
		"udp 192.0.2.0/28:4739":    {unix.IPPROTO_UDP, true, false, "192.0.2.0/28", 4739, "udp 192.0.2.0/28:4739"},
		"udp 192.0.2.7:1":          {unix.IPPROTO_UDP, true, false, "192.0.2.7/32", 1, "udp 192.0.2.7:1"},
		"udp 192.0.2.7/32:65535":   {unix.IPPROTO_UDP, true, false, "192.0.2.7/32", 65535, "udp 192.0.2.7:65535"},
		"udp [2001:db8::]/64:4739": {unix.IPPROTO_UDP, false, true, "2001:db8::/64", 4739, "udp [2001:db8::]/64:4739"},
		"udp [2001:db8::/64]:4739": {unix.IPPROTO_UDP, false, true, "2001:db8::/64", 4739, "udp [2001:db8::]/64:4739"},
		"tcp [2001:db8::1]:53":     {unix.IPPROTO_TCP, false, true, "2001:db8::1/128", 53, "tcp [2001:db8::1]:53"},
		"udp [::ffff:192.0.2.1]:7": {unix.IPPROTO_UDP, true, false, "192.0.2.1/32", 7, "udp 192.0.2.1:7"},
		"udp 0.0.0.0/0:53":         {unix.IPPROTO_UDP, true, false, "0.0.0.0/0", 53, "udp4 :53"},
		"udp [::]/0:53":            {unix.IPPROTO_UDP, false, true, "::/0", 53, "udp6 :53"},
		"tcp4 192.0.2.1:80":        {unix.IPPROTO_TCP, true, false, "192.0.2.1/32", 80, "tcp 192.0.2.1:80"},
	} {
		l, err := ParseListen(s)
		if err != nil {
			t.Error(err)
			continue
		}
		prefix := ""
		if l.Prefix.IsValid() {
			prefix = l.Prefix.String()
		}
		if l.Proto != want.proto || l.V4 != want.v4 || l.V6 != want.v6 || prefix != want.prefix || l.Port != want.port || l.String() != s {
			t.Errorf("%q is %+v, want %+v", s, l, want)
		}
		var eps []string
		for _, e := range l.Endpoints(3) {
			eps = append(eps, e.String())
			if e.Listen != 3 {
				t.Errorf("%q: endpoint of listen %d, want 3", s, e.Listen)
			}
		}
		if got := strings.Join(eps, ", "); got != want.endpoints {
			t.Errorf("%q has endpoints %s, want %s", s, got, want.endpoints)
		}
	}
}

func TestParseListenTrims(t *testing.T) {
	if l := parse(t, "  udp   :4739 "); l.String() != "udp :4739" {
		t.Errorf("got %q", l)
	}
}

func TestParseListenErrors(t *testing.T) {
	for s, want := range map[string]string{
		"":                         `want a protocol and an address, like "udp 0.0.0.0:4739"`,
		"udp":                      "want a protocol and an address",
		"udp ":                     "want a protocol and an address",
		"0.0.0.0:4739":             "want a protocol and an address",
		"sctp :4739":               `protocol "sctp": want udp or tcp`,
		"UDP :4739":                `protocol "UDP": want udp or tcp`,
		"udp5 :4739":               `protocol "udp5": want udp or tcp`,
		"udp46 :4739":              `protocol "udp46": want udp, udp4`,
		"46 :4739":                 `protocol "46"`,
		"udp 4739":                 "no port: add one, like 4739:4739",
		"udp :":                    `port "": want a number from 1 to 65535`,
		"udp :0":                   `port "0": want a number from 1 to 65535`,
		"udp :65536":               `port "65536": want`,
		"udp :-1":                  `port "-1": want`,
		"udp :ipfix":               `port "ipfix": want`,
		"udp 192.0.2.1":            "no port: add one, like 192.0.2.1:4739",
		"udp 2001:db8::1:53":       `put an IPv6 address in brackets, like [2001:db8::1]:53`,
		"udp [2001:db8::1:53":      "a [ without its ]",
		"udp host.example:53":      `"host.example" is not an IP address or prefix`,
		"udp 192.0.2.256:53":       `"192.0.2.256" is not an IP address or prefix`,
		"udp 192.0.2.0/33:53":      `prefix length "33": want a number from 0 to 32`,
		"udp 192.0.2.0/:53":        `prefix length "": want a number`,
		"udp [2001:db8::]/129:53":  `prefix length "129": want a number from 0 to 128`,
		"udp 192.0.2.7/24:53":      "prefix 192.0.2.7/24 has bits set beyond its length; did you mean 192.0.2.0/24?",
		"udp [2001:db8::1]/64:53":  "did you mean 2001:db8::/64?",
		"udp [fe80::1%eth0]:53":    "zones are not supported: leave out %eth0",
		"udp4 [2001:db8::1]:53":    `is not of the family of "udp4"`,
		"tcp6 192.0.2.1:53":        `is not of the family of "tcp6"`,
		"tcp6 0.0.0.0:53":          `is not of the family of "tcp6"`,
		"tcp4 [::]:53":             `is not of the family of "tcp4"`,
		"udp 192.0.2.1 :53":        "is not an IP address or prefix",
		"udp [::ffff:1.2.3.4]/96:": `port ""`,
	} {
		l, err := ParseListen(s)
		if !errors.Is(err, ErrListen) {
			t.Errorf("%q: %+v, %v; want ErrListen", s, l, err)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want it to say %q", s, err, want)
		}
	}
}

func TestListenText(t *testing.T) {
	in := []Listen{parse(t, "udp 192.0.2.0/28:4739"), parse(t, "tcp [::]:1790")}
	b, err := json.Marshal(in)
	if err != nil || string(b) != `["udp 192.0.2.0/28:4739","tcp [::]:1790"]` {
		t.Errorf("marshalled as %s, %v", b, err)
	}
	var out []Listen
	if err := json.Unmarshal(b, &out); err != nil || !slices.Equal(in, out) {
		t.Errorf("unmarshalled as %+v, %v; want %+v", out, err, in)
	}
	if err := json.Unmarshal([]byte(`["udp"]`), &out); !errors.Is(err, ErrListen) {
		t.Errorf("bad text: %v", err)
	}
}

func TestOverlaps(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"udp :4739", "udp :4739", true},
		{"udp :4739", "udp4 :4739", true},
		{"udp :4739", "udp [::]:4739", true},
		{"udp4 :4739", "udp6 :4739", false},
		{"udp :4739", "tcp :4739", false},
		{"udp :4739", "udp :4740", false},
		{"udp 192.0.2.0/24:1", "udp 192.0.2.0/24:1", true},
		{"udp 192.0.2.0/24:1", "udp 192.0.2.0/28:1", false}, // the longer prefix wins
		{"udp 192.0.2.0/24:1", "udp :1", false},
		{"udp 192.0.2.1:1", "udp [::ffff:192.0.2.1]:1", true},
		{"udp 0.0.0.0:1", "udp 0.0.0.0/0:1", true},
	} {
		got := false
		for _, e := range parse(t, c.a).Endpoints(0) {
			for _, f := range parse(t, c.b).Endpoints(1) {
				if e.Overlaps(f) != f.Overlaps(e) {
					t.Errorf("%s and %s overlap one way only", e, f)
				}
				got = got || e.Overlaps(f)
			}
		}
		if got != c.want {
			t.Errorf("%q overlaps %q: %v, want %v", c.a, c.b, got, c.want)
		}
	}
}

func FuzzParseListen(f *testing.F) {
	for _, s := range []string{"udp 0.0.0.0:4739", "tcp [::]:1790", "tcp6 :1", "udp 192.0.2.0/28:4739", "udp [2001:db8::/64]:4739",
		"udp4 *:53", "udp [::ffff:1.2.3.4]:1", "udp [fe80::1%x]:1", "tcp4 [::]:1", "udp [::]/0:1", "udp 2001:db8::1:53", " udp  :1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		l, err := ParseListen(s)
		if err != nil {
			if !errors.Is(err, ErrListen) {
				t.Errorf("%q: %v is not ErrListen", s, err)
			}
			return
		}
		again, err := ParseListen(l.String())
		if err != nil || again != l {
			t.Errorf("%q is %+v; its text %q is %+v, %v", s, l, l, again, err)
		}
		eps := l.Endpoints(0)
		if len(eps) == 0 || l.Port == 0 || l.V4 != (eps[0].Family == unix.AF_INET) || len(eps) == 2 && !(l.V4 && l.V6) {
			t.Errorf("%q is %+v with endpoints %v", s, l, eps)
		}
		for _, e := range eps {
			checkEndpoint(t, s, e)
		}
	})
}

// checkEndpoint checks that an endpoint is complete, and that its text is a listen for exactly this endpoint.
func checkEndpoint(t *testing.T, s string, e Endpoint) {
	t.Helper()
	if !e.Prefix.IsValid() || e.Prefix != e.Prefix.Masked() || e.Prefix.Addr().Is4() != (e.Family == unix.AF_INET) || e.Prefix.Addr().Zone() != "" {
		t.Errorf("%q has endpoint %+v", s, e)
	}
	if back, err := ParseListen(e.String()); err != nil || !slices.Equal(back.Endpoints(0), []Endpoint{e}) {
		t.Errorf("%q: endpoint %+v is printed as %q, which is %+v, %v", s, e, e, back, err)
	}
}
