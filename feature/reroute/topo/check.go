// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxName is the longest name of a router, medium, risk group or interface, in bytes.
const maxName = 255

// checkName rejects names unusable on a command line or easily confused: control and invisible characters, blanks at
// an end, and the arrow between a link's routers.
func checkName(what, name string) error {
	odd := func(r rune) bool { return !unicode.IsPrint(r) || r == '→' }
	switch at := strings.IndexFunc(name, odd); {
	case !utf8.ValidString(name):
		return fmt.Errorf("%s %q: the name is not UTF-8 text: give it another", what, name)
	case at >= 0:
		r, _ := utf8.DecodeRuneInString(name[at:])
		return fmt.Errorf("%s %q: the name has the character %U: use letters, digits, blanks and signs", what, name, r)
	case strings.TrimSpace(name) != name:
		return fmt.Errorf("%s %q: the name begins or ends with a blank: remove it", what, name)
	case len(name) > maxName:
		return fmt.Errorf("%s %.40q…: a name of %d bytes: use at most %d", what, name, len(name), maxName)
	}
	return nil
}

// checkNames checks all names of a link.
func (l *Link) checkNames() error {
	errs := []error{checkName("interface", l.Interface), checkName("lan", l.LAN)}
	for _, g := range l.SRLGs {
		errs = append(errs, checkName("srlg", g))
	}
	return errors.Join(errs...)
}

// sidOwners maps each SID to its function and its router or link.
type sidOwners map[netip.Addr]string

func (o sidOwners) add(sid netip.Addr, function, of string) error {
	if !sid.IsValid() {
		return nil
	}
	function += " of " + of
	if other, taken := o[sid]; taken {
		return fmt.Errorf("%s has the SID %s, as has the %s: each function needs its own", function, sid, other)
	}
	o[sid] = function
	return nil
}

// node adds the SIDs of a router. One address as both End.DT6 and End.DT4 is an End.DT46.
func (o sidOwners) node(x *Node) error {
	errs := []error{o.add(x.End, "end", "node "+x.Name), o.add(x.DT6, "dt6", "node "+x.Name)}
	if x.DT4 != x.DT6 {
		errs = append(errs, o.add(x.DT4, "dt4", "node "+x.Name))
	}
	return errors.Join(errs...)
}

func (o sidOwners) link(endX, dx6 netip.Addr, from, to string) error {
	of := "link " + from + "→" + to
	return errors.Join(o.add(endX, "endx", of), o.add(dx6, "dx6", of))
}

// checkSIDs reports duplicate SIDs. A repair by one of them may lead elsewhere.
func (n *Network) checkSIDs() error {
	owners, errs := sidOwners{}, []error(nil)
	for i := range n.Nodes {
		errs = append(errs, owners.node(&n.Nodes[i]))
	}
	for i := range n.Links {
		l := &n.Links[i]
		errs = append(errs, owners.link(l.EndX, l.DX6, n.Nodes[l.From].Name, n.Nodes[l.To].Name))
	}
	return errors.Join(errs...)
}
