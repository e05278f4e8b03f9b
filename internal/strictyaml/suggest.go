// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"net/netip"
	"reflect"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// suggestScalar guesses the meaning of a scalar of the wrong type.
func suggestScalar(v reflect.Value, n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode {
		return ""
	}
	switch {
	case v.Type() == durationType:
		if _, err := strconv.ParseUint(n.Value, 10, 32); err == nil {
			return n.Value + "s"
		}
	case v.Kind() == reflect.Bool:
		switch strings.ToLower(n.Value) {
		case "true", "yes", "on", "y", "1":
			return "true"
		case "false", "no", "off", "n", "0":
			return "false"
		}
	}
	return ""
}

// suggestText guesses for the standard library's text types, which are common in network
// configurations.
func suggestText(v reflect.Value, s string) string {
	if v.Type() != reflect.TypeFor[netip.Prefix]() {
		return ""
	}
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" {
		return ""
	}
	return netip.PrefixFrom(addr, addr.BitLen()).String()
}

func textWanted(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[netip.Prefix]():
		return "a prefix like 192.0.2.0/24"
	case reflect.TypeFor[netip.Addr]():
		return "an address like 192.0.2.1"
	case reflect.TypeFor[netip.AddrPort]():
		return "an address and port like 192.0.2.1:4739"
	}
	return "a value"
}
