// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/table"
)

func TestParseBindings(t *testing.T) {
	all, err := parseBindings("f", []byte(`{"bindings": [
		{"label": "foo", "prefix": "127.0.0.1"},
		{"label": "bar", "prefix": "2001:db8::/64", "port": 80, "protocol": "tcp"},
		{"label": "bar", "prefix": "::ffff:192.0.2.0/120", "port": 53, "protocol": "udp"},
		{"label": "foo", "prefix": "127.0.0.1/32", "port": 0, "protocol": "udp"}
	]}`))
	var got []string
	for _, b := range all {
		got = append(got, b.String())
	}
	want := []string{"tcp 127.0.0.1/32 every port → foo", "udp 127.0.0.1/32 every port → foo", "udp 192.0.2.0/24 53 → bar", "tcp 2001:db8::/64 80 → bar"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v %v", got, err)
	}
	text, err := WriteBindings(all)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := parseBindings("f", text); err != nil || !slices.Equal(again, all) {
		t.Errorf("written and read again: %v %v", again, err)
	}
	for text, want := range map[string]string{
		``:                    "f:1: invalid binding: unexpected end of file",
		`[]`:                  "f:1: invalid binding: want an object with bindings",
		`{}`:                  "list bindings is missing",
		"{\n\"bindngs\": []}": `f:2: invalid binding: "bindngs"`,
		"{\"bindings\": [\n{\"label\": \"a\", \"prefix\": \"127.0.0.1\"},\n{\"label\": \"b\", \"prefix\": \"127.0.0.1\"}]}": "f:3: invalid binding: tcp 127.0.0.1/32 port 0 is bound to a above, and to b here",
		"{\"bindings\": [\n\n{\"label\": \"\", \"prefix\": \"127.0.0.1\"}]}":                                                "f:3: invalid binding: label",
		"{\"bindings\": [\n{\"label\": \"a\", \"prefix\": \"127.0.0.0/33\"}]}":                                              `f:2: invalid binding: prefix: "127.0.0.0/33" is not an address`,
		"{\"bindings\": [\n{\"label\": \"a\", \"prefix\": \"192.0.2.7/24\"}]}":                                              `f:2: invalid binding: prefix: "192.0.2.7/24" has bits set beyond its length: write 192.0.2.0/24`,
		"{\"bindings\": [\n{\"label\": \"a\", \"prefix\": \"224.0.0.1\"}]}":                                                 `f:2: invalid binding: prefix: 224.0.0.1/32 is a multicast address, and no lookup program gets its packets`,
		"{\"bindings\": [\n{\"label\": \"a\", \"prefix\": \"127.0.0.0\", \"port\": 65536}]}":                                "f:2: invalid binding: port",
		"{\"bindings\": [\n{\"label\": \"a\", \"prefix\": \"127.0.0.0\", \"protocol\": \"sctp\"}]}":                         "f:2: invalid binding: protocol",
		"{\"bindings\": [\n{\"label\": \"a\", \"prefix\": \"127.0.0.0\", \"ports\": 1}]}":                                   `"ports": want label, prefix, port and protocol`,
		`{"bindings": []} x`: "unexpected data",
	} {
		if _, err := parseBindings("f", []byte(text)); err == nil || !errors.Is(err, ErrBinding) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func FuzzParseBindings(f *testing.F) {
	f.Add([]byte(`{"bindings": [{"label": "foo", "prefix": "127.0.0.1", "port": 1, "protocol": "tcp"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := parseBindings("f", text)
		if err != nil {
			return
		}
		seen := map[table.Key]bool{}
		for _, b := range all {
			if seen[b.key()] || b.Prefix.Masked() != b.Prefix || b.Prefix.Addr().Is4In6() && b.Prefix.Bits() >= 96 {
				t.Errorf("%+v of %q", b, text)
			}
			seen[b.key()] = true
		}
	})
}
