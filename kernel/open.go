// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Opened is a published instance, open for reading or, through a WriteLock, for
// writing. Close it.
type Opened struct {
	Instance Instance
	Meta     Meta
	Maps     map[string]*ebpf.Map
	dir      string
}

// Open opens an instance for reading: the group may. Only the maps named are
// opened, all of them when none is. It returns ErrNotExist where the instance
// is not published.
func (r *Root) Open(i Instance, maps ...string) (*Opened, error) {
	return r.open(i, &ebpf.LoadPinOptions{ReadOnly: true}, maps)
}

// Open opens an instance for writing.
func (l *WriteLock) Open(i Instance, maps ...string) (*Opened, error) {
	return l.Root.open(i, nil, maps)
}

func (r *Root) open(i Instance, opts *ebpf.LoadPinOptions, maps []string) (*Opened, error) {
	o, err := r.openOnce(i, opts, maps)
	if errors.Is(err, ErrNotExist) {
		// A replacement without RENAME_EXCHANGE leaves the name free for an instant.
		if _, staged := os.Stat(r.dir(i) + stagedSuffix); staged == nil {
			time.Sleep(10 * time.Millisecond)
			o, err = r.openOnce(i, opts, maps)
		}
	}
	return o, err
}

func (r *Root) openOnce(i Instance, opts *ebpf.LoadPinOptions, maps []string) (*Opened, error) {
	o := &Opened{Instance: i, Maps: map[string]*ebpf.Map{}, dir: r.dir(i)}
	meta, err := r.loadMap(filepath.Join(o.dir, metaPin), opts)
	if err != nil {
		return nil, err
	}
	defer meta.Close()
	var b []byte
	if b, err = meta.LookupBytes(uint32(0)); err == nil {
		err = o.Meta.unmarshal(b)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", filepath.Join(o.dir, metaPin), err)
	}
	if len(maps) == 0 {
		if maps, err = pinNames(o.dir, mapPrefix); err != nil {
			return nil, err
		}
	}
	for _, name := range maps {
		m, err := r.loadMap(filepath.Join(o.dir, mapPrefix+name), opts)
		if err != nil {
			o.Close()
			return nil, err
		}
		o.Maps[name] = m
	}
	return o, nil
}

func (r *Root) loadMap(path string, opts *ebpf.LoadPinOptions) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, opts)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%s: %w", path, ErrNotExist)
	case errors.Is(err, os.ErrPermission):
		return nil, r.unreadable(path)
	case err != nil:
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	return m, nil
}

// Link opens a pinned link, which only the owner may.
func (o *Opened) Link(name string) (link.Link, error) {
	l, err := link.LoadPinnedLink(filepath.Join(o.dir, linkPrefix+name), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", filepath.Join(o.dir, linkPrefix+name), ErrNotExist)
	}
	return l, err
}

// Links lists the names of the instance's links.
func (o *Opened) Links() ([]string, error) { return pinNames(o.dir, linkPrefix) }

// Close closes the maps; the pins stay.
func (o *Opened) Close() {
	for _, m := range o.Maps {
		m.Close()
	}
}

func pinNames(dir, prefix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if n, ok := strings.CutPrefix(e.Name(), prefix); ok {
			out = append(out, n)
		}
	}
	return out, nil
}
