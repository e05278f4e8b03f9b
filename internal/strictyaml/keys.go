// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"strings"

	"go.yaml.in/yaml/v3"
)

// key is a key of a mapping, with the position of its value and the keys below.
type key struct {
	name  string
	at    Pos
	under *[]key // nil: the value is no mapping, or two levels below the Pos
}

// aliasedKeys are the keys of an anchor's mapping.
type aliasedKeys struct {
	anchor *yaml.Node
	levels int
}

// keys lists the keys of a mapping, levels deep. It copies its data, because a configuration
// outlives the nodes of its file.
func (d *Decoder) keys(n *yaml.Node, levels int) *[]key {
	if n.Kind == yaml.AliasNode && levels > 0 {
		// A thousand aliases share one list.
		at := aliasedKeys{n.Alias, levels}
		if d.listed == nil {
			d.listed = make(map[aliasedKeys]*[]key)
		}
		list, ok := d.listed[at]
		if !ok {
			list = d.keys(n.Alias, levels)
			d.listed[at] = list
		}
		return list
	}
	if n.Kind != yaml.MappingNode || levels == 0 {
		return nil
	}
	list := make([]key, 0, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		place := value
		if value.Kind != yaml.ScalarNode && value.Kind != yaml.AliasNode && value.Style&yaml.FlowStyle == 0 {
			place = name // a block begins on another line than its key
		}
		list = append(list, key{name.Value, Pos{File: d.file, Line: max(place.Line, 1), Column: max(place.Column, 1)}, d.keys(value, levels-1)})
	}
	return &list
}

// named returns the position of the value named by a message. The message's parts, up to ": ", name
// it. The first part, or the second one behind a path, begins with a key of the mapping. Later
// parts may name a key beside or below it.
func (p Pos) named(msg string) Pos {
	at, here := p, p.keys
	for i, part := range strings.Split(msg, ": ") {
		word, _, _ := strings.Cut(part, " ")
		k := lookup(here, word)
		if k == nil && i > 0 {
			break
		}
		if k == nil {
			continue
		}
		at = k.at
		if k.under != nil {
			here = k.under
		}
	}
	return at
}

// At returns the position of a key's value, or of the mapping without such a key.
func (p Pos) At(key string) Pos {
	if k := lookup(p.keys, key); k != nil {
		return k.at
	}
	p.keys = nil
	return p
}

func lookup(keys *[]key, name string) *key {
	if keys == nil {
		return nil
	}
	for i := range *keys {
		if (*keys)[i].name == name {
			return &(*keys)[i]
		}
	}
	return nil
}
