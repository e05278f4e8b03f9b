// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MovedError reports a file, or a part of it, in a former form. It holds the section of weir.yaml to use instead.
type MovedError struct {
	File    string
	Section string // converted section
}

func (e *MovedError) Error() string {
	return fmt.Sprintf("%s has a former form: put this into weir.yaml:\n\n%s", e.File, e.Section)
}

// former are the file formats that have become sections.
var former = []struct {
	has    []string // keys that identify such a file
	lacks  []string
	path   []string
	insert [2]string         // a key with its former default, to insert if missing
	rename map[string]string // renamed keys at any depth, by parent and key, or by key at the top; "": removed
}{
	{has: []string{"devices", "listen", "services"}, lacks: []string{"front", "number"}, path: []string{"lb"}, insert: [2]string{"name", "front"},
		rename: map[string]string{"hosts": "backends", "tls.signers": "ca", "metrics": "", "hold": "buffer_timeout", "lapse": "move_timeout", "ended": "ended_timeout",
			"idle": "idle_timeout", "down": "agent_timeout", "settle": "startup_timeout"}},
	{has: []string{"number", "address", "front"}, path: []string{"handoff", "backend"},
		rename: map[string]string{"front": "lb", "tls.signers": "ca", "metrics": "", "park": "buffer", "patience": "timeout", "limit": "max_queues"}},
}

// moved returns a MovedError for a former file, or nil.
func moved(path string, data []byte) error {
	var doc yaml.Node
	if yaml.Unmarshal(data, &doc) != nil || len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil
	}
	top := doc.Content[0]
	keys := mappingKeys(top)
	for i := 0; i+1 < len(top.Content); i += 2 { // handoff had the keeper's keys
		if v := top.Content[i+1]; top.Content[i].Value == "handoff" && slices.ContainsFunc(mappingKeys(v), func(k string) bool { return slices.Contains(formerKeeper, k) }) {
			renameKeys(v, "", map[string]string{"sessions": "max_sessions", "state": "max_state", "total": "max_total"})
			return section(path, []string{"handoff", "keeper"}, v)
		}
	}
	for _, f := range former {
		if slices.ContainsFunc(f.has, func(k string) bool { return !slices.Contains(keys, k) }) || slices.ContainsFunc(f.lacks, func(k string) bool { return slices.Contains(keys, k) }) {
			continue
		}
		renameKeys(top, "", f.rename)
		if f.insert[0] != "" && !slices.Contains(keys, f.insert[0]) {
			top.Content = append([]*yaml.Node{{Kind: yaml.ScalarNode, Value: f.insert[0]}, {Kind: yaml.ScalarNode, Value: f.insert[1]}}, top.Content...)
		}
		return section(path, f.path, top)
	}
	return nil
}

// formerKeeper are the keys of the session keeper that were directly below handoff.
var formerKeeper = []string{"hold", "grace", "sessions", "state", "total"}

// section returns the error with a section of these contents.
func section(file string, path []string, n *yaml.Node) error {
	for _, key := range slices.Backward(path) {
		n = &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{{Kind: yaml.ScalarNode, Value: key}, n}}
	}
	var text bytes.Buffer
	e := yaml.NewEncoder(&text)
	e.SetIndent(2)
	if err := e.Encode(n); err != nil {
		return nil
	}
	return &MovedError{File: file, Section: text.String()}
}

func mappingKeys(n *yaml.Node) (out []string) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		out = append(out, n.Content[i].Value)
	}
	return out
}

// renameKeys renames keys. A key with an empty new name is removed.
func renameKeys(n *yaml.Node, path string, names map[string]string) {
	if n.Kind != yaml.MappingNode {
		return
	}
	var kept []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		at := strings.TrimPrefix(path+"."+key.Value, ".")
		renameKeys(value, at, names)
		if name, ok := names[at]; ok && name == "" {
			continue
		} else if ok {
			key.Value = name
		}
		kept = append(kept, key, value)
	}
	n.Content = kept
}
