// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"os"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/dplane"
	"github.com/weir-project/weir/internal/fdstore"
)

// While weir serve restarts, systemd holds the connections to bfdd and the links of its sessions' programs (package
// fdstore). bfdd's data plane stays connected, and the sessions continue. The names are weir-bfdd.SCOPE.conn.COOKIE
// and weir-bfdd.SCOPE.link.NAME.
const storePrefix = "weir-bfdd."

// inherited holds the previous process's files of a namespace.
type inherited struct {
	k           *keep
	links       map[string]*os.File // by name
	connections []*os.File
}

// inherit takes the files from systemd, by scope; nil: none.
func inherit() map[string]*inherited {
	out := map[string]*inherited{}
	for _, f := range fdstore.Take(storePrefix) {
		scope, rest, _ := strings.Cut(strings.TrimPrefix(f.Name(), storePrefix), ".")
		if out[scope] == nil {
			out[scope] = &inherited{k: &keep{scope: scope}, links: map[string]*os.File{}}
		}
		if name, isLink := strings.CutPrefix(rest, "link."); isLink {
			out[scope].links[name] = f
		} else {
			out[scope].connections = append(out[scope].connections, f)
		}
	}
	return out
}

func (l *inherited) parts() (links map[string]*os.File, connections []*os.File) {
	if l == nil {
		return nil, nil
	}
	return l.links, l.connections
}

// drop closes the files of namespaces without BFD.
func drop(all map[string]*inherited) {
	for _, l := range all {
		l.k.drop(l.connections)
		closeLinks(l.k, l.links)
	}
}

// keep stores a namespace's files with systemd; nil: there is no store.
type keep struct {
	scope string
	log   feature.Logger
}

func newKeep(scope string, log feature.Logger) *keep {
	if !fdstore.Available() {
		return nil
	}
	return &keep{scope, log}
}

func (k *keep) name(kind, name string) string { return storePrefix + k.scope + "." + kind + "." + name }

// put stores a file. After a failure it warns, because the file's sessions then end with this process.
func (k *keep) put(kind, name string, fd int) error {
	err := fdstore.Put(k.name(kind, name), fd)
	if err != nil {
		k.log.Warn("sessions of bfdd will go down when weir serve restarts", "err", err)
	}
	return err
}

func (k *keep) remove(kind, name string) {
	_ = fdstore.Remove(k.name(kind, name)) // without a service manager nothing is stored
}

// drop closes connections. bfdd then has their sessions down, and hands them over again.
func (k *keep) drop(connections []*os.File) {
	for _, f := range connections {
		_ = fdstore.Remove(f.Name())
		f.Close()
	}
}

func closeLinks(k *keep, links map[string]*os.File) {
	for name, f := range links {
		if k != nil {
			k.remove("link", name)
		}
		f.Close()
	}
}

// connections returns k for package dplane.
func (k *keep) connections() dplane.Keep {
	if k == nil {
		return nil
	}
	return connectionKeep{k}
}

type connectionKeep struct{ k *keep }

func (c connectionKeep) Put(cookie uint64, fd int) error {
	return c.k.put("conn", strconv.FormatUint(cookie, 10), fd)
}

func (c connectionKeep) Remove(cookie uint64) { c.k.remove("conn", strconv.FormatUint(cookie, 10)) }

// linkKeep is a keep for package engine. It ignores errors, because the engine has no alternative.
type linkKeep struct{ k *keep }

func (l linkKeep) Put(link string, fd int) error {
	_ = l.k.put("link", link, fd) // put has warned
	return nil
}

func (l linkKeep) Remove(link string) { l.k.remove("link", link) }
