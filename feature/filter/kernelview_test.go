// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// tcxPrograms counts the programs at both tcx hooks of a device of this thread's namespace.
func tcxPrograms(index int) (n int, err error) {
	for _, side := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: side})
		if errors.Is(err, link.ErrNotSupported) {
			return 0, nil
		} else if err != nil {
			return 0, err
		}
		n += len(q.Programs)
	}
	return n, nil
}

// dispatchers counts netfilter's links that run the dispatcher of filters.
func dispatchers(t testing.TB) (n int) {
	t.Helper()
	var it link.Iterator
	defer it.Close()
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil || info.Netfilter() == nil {
			continue
		}
		p, err := ebpf.NewProgramFromID(info.Program)
		if err != nil {
			continue // it went this instant
		}
		if pi, err := p.Info(); err == nil && pi.Name == "filter_dispatch" {
			n++
		}
		p.Close()
	}
	return n
}

// withoutWeir leaves weir's tables, and what is in them, out of a ruleset in JSON.
func withoutWeir(t testing.TB, text string) string {
	t.Helper()
	var all struct {
		Nftables []map[string]map[string]any `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	var out strings.Builder
	for _, o := range all.Nftables {
		for kind, fields := range o {
			name, _ := fields["name"].(string)
			table, _ := fields["table"].(string)
			if kind == "metainfo" || kind == "table" && strings.HasPrefix(name, "weir_") || strings.HasPrefix(table, "weir_") {
				continue
			}
			b, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			out.Write(b)
			out.WriteByte('\n')
		}
	}
	return out.String()
}
