// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"unicode/utf8"

	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/internal/suggest"
)

// ownFile is weir's own format, in YAML or JSON.
type ownFile struct {
	Name  string    `yaml:"name"`
	Nodes []ownNode `yaml:"nodes"`
	Links []ownLink `yaml:"links"`
}

type ownNode struct {
	Pos      strictyaml.Pos
	Name     string         `yaml:"name"`
	Position []float64      `yaml:"position"` // x and y, or longitude and latitude
	Overload bool           `yaml:"overload"`
	Prefixes []netip.Prefix `yaml:"prefixes"`
	End      netip.Addr     `yaml:"end"`
	DT6      netip.Addr     `yaml:"dt6"`
	DT4      netip.Addr     `yaml:"dt4"`
	DT46     netip.Addr     `yaml:"dt46"`
}

// ownLink is an adjacency. back holds the values of the other direction.
type ownLink struct {
	Pos  strictyaml.Pos
	From string   `yaml:"from"`
	To   string   `yaml:"to"`
	SRLG []string `yaml:"srlg"`
	LAN  string   `yaml:"lan"`
	ownSide
	Back *ownSide `yaml:"back"`
}

type ownSide struct {
	Metric    uint32     `yaml:"metric"`
	Interface string     `yaml:"interface"`
	Address   netip.Addr `yaml:"address"`
	EndX      netip.Addr `yaml:"endx"`
	DX6       netip.Addr `yaml:"dx6"`
}

// readOwn reads weir's own format. Errors, including unknown keys, carry their position.
func readOwn(file string, data []byte) (*Network, error) {
	if json.Valid(data) {
		data = plainEscapes(data)
	}
	var doc ownFile
	if err := strictyaml.Decode(file, data, &doc); err != nil {
		return nil, err
	}
	b, owners := NewBuilder(doc.Name), sidOwners{}
	var errs []error
	for _, x := range doc.Nodes {
		switch _, twice := b.byName[x.Name]; {
		case x.Name == "":
			errs = append(errs, x.Pos.Errorf("a node needs a name"))
			continue
		case twice:
			errs = append(errs, x.Pos.Errorf("node %s exists already", x.Name))
			continue
		}
		if err := checkName("node", x.Name); err != nil {
			errs = append(errs, x.Pos.At("name").Errorf("%w", err))
			continue
		}
		n := b.At(b.Node(x.Name))
		n.Overload = x.Overload
		n.setSIDs(x.End, x.DT6, x.DT4, x.DT46)
		errs = append(errs, placed(x.Pos, owners.node(n)))
		for _, p := range x.Prefixes {
			b.Announce(b.byName[x.Name], p, 0)
		}
		switch len(x.Position) {
		case 0:
		case 2:
			n.At = &Point{x.Position[0], x.Position[1]}
		default:
			errs = append(errs, x.Pos.Errorf("node %s: position has %d numbers: give x and y", x.Name, len(x.Position)))
		}
		for what, sid := range map[string]netip.Addr{"end": x.End, "dt6": x.DT6, "dt4": x.DT4, "dt46": x.DT46} {
			if sid.IsValid() && !sid.Is6() {
				errs = append(errs, x.Pos.Errorf("node %s: %s: %s is no SID: want an IPv6 address", x.Name, what, sid))
			}
		}
	}
	for _, l := range doc.Links {
		errs = append(errs, l.add(b), placed(l.Pos, owners.link(l.EndX, l.DX6, l.From, l.To)))
		if l.Back != nil {
			errs = append(errs, placed(l.Pos.At("back"), owners.link(l.Back.EndX, l.Back.DX6, l.To, l.From)))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	doc.noteMetrics(b)
	n, err := b.Network()
	if err != nil {
		return nil, strictyaml.Pos{File: file, Line: 1, Column: 1}.Errorf("%w", err)
	}
	return n, nil
}

// placed adds a position to joined errors.
func placed(at strictyaml.Pos, err error) error {
	if err == nil {
		return nil
	}
	return at.Errorf("%w", err)
}

// plainEscapes replaces JSON escapes unknown to the YAML parser: \/ and surrogate pairs.
func plainEscapes(data []byte) []byte {
	out := make([]byte, 0, len(data))
	for i := 0; i < len(data); i++ {
		if data[i] != '\\' {
			out = append(out, data[i])
			continue
		}
		var text string
		switch n := min(12, len(data)-i); {
		case data[i+1] == '/':
		case data[i+1] == 'u' && n == 12 && json.Unmarshal(slices.Concat([]byte(`"`), data[i:i+n], []byte(`"`)), &text) == nil && utf8.RuneCountInString(text) == 1:
			out = append(out, text...)
			i += n - 1
		default:
			out = append(out, data[i], data[i+1])
			i++
		}
	}
	return out
}

// noteMetrics notes links without a metric if others have one. Without any, counting hops is intended.
func (f ownFile) noteMetrics(b *Builder) {
	without, example := 0, ""
	for _, l := range f.Links {
		if l.Metric == 0 {
			without++
			example = cmp.Or(example, l.From+" to "+l.To)
		}
	}
	if without > 0 && without < len(f.Links) {
		b.note("%d of %d links have no metric (%s): each gets 1", without, len(f.Links), example)
	}
}

func (l ownLink) add(b *Builder) error {
	there := Link{LAN: l.LAN, SRLGs: l.SRLG}
	for name, to := range map[string]*int{l.From: &there.From, l.To: &there.To} {
		i, ok := b.byName[name]
		if !ok {
			var names []string
			for _, n := range b.n.Nodes {
				names = append(names, n.Name)
			}
			if close := suggest.Nearest(name, names); close != "" {
				return l.Pos.Errorf("there is no node %q; did you mean %q?", name, close)
			}
			return l.Pos.Errorf("there is no node %q: list it under nodes", name)
		}
		*to = i
	}
	if l.From == l.To {
		return l.Pos.Errorf("a link joins two nodes, but this one joins %s with itself", l.From)
	}
	back := there
	l.ownSide.into(&there)
	if l.Back != nil {
		l.Back.into(&back)
	}
	if back.Metric == 0 {
		back.Metric = l.Metric
	}
	for _, m := range []*uint32{&there.Metric, &back.Metric} {
		if *m == 0 {
			*m = 1
		}
		if *m > maxMetric {
			return l.Pos.Errorf("metric %d: use 1 to %d", *m, maxMetric)
		}
	}
	there.Remote, back.Remote = back.Local, there.Local
	b.Link(there, back)
	return placed(l.Pos, errors.Join(there.checkNames(), checkName("interface", back.Interface)))
}

func (s ownSide) into(l *Link) {
	l.Metric, l.Interface, l.Local, l.EndX, l.DX6 = s.Metric, s.Interface, s.Address, s.EndX, s.DX6
}
