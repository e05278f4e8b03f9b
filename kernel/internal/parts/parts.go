// SPDX-License-Identifier: Apache-2.0

// Package parts is the end of a meta: the names of its instance and of its maps. By them a reader notices pins of another
// instance, and a lost pin.
package parts

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// Parts are an instance and its maps, by pin name without prefix. The zero value is of an earlier weir: everything fits.
type Parts struct {
	Instance string   `json:"instance"` // SCOPE/FEATURE/NAME
	Maps     []string `json:"maps"`     // the needed ones, sorted
	Optional []string `json:"optional,omitempty"`
}

// Of returns the parts of an instance.
func Of(instance string, maps, optional []string) Parts {
	maps = slices.DeleteFunc(slices.Sorted(slices.Values(maps)), func(m string) bool { return slices.Contains(optional, m) })
	return Parts{instance, maps, optional}
}

// Marshal returns the bytes after the configuration of a meta.
func (p Parts) Marshal() []byte {
	if p.Instance == "" {
		return nil
	}
	b, _ := json.Marshal(p) // strings only
	return b
}

// Parse parses the bytes after the configuration.
func Parse(b []byte) (p Parts, err error) {
	if len(b) == 0 {
		return p, nil
	}
	if err := json.Unmarshal(b, &p); err != nil || p.Instance == "" {
		return p, errors.Join(errors.New("the end of meta describes no instance"), err)
	}
	return p, nil
}

// Fits returns an error if the parts are of another instance.
func (p Parts) Fits(instance string) error {
	if p.Instance != "" && p.Instance != instance {
		return fmt.Errorf("its meta is of %s", p.Instance)
	}
	return nil
}

// Lacks returns a map that is not among the pinned ones.
func (p Parts) Lacks(pinned []string) (name string, lacks bool) {
	i := slices.IndexFunc(p.Maps, func(m string) bool { return !slices.Contains(pinned, m) })
	if i < 0 {
		return "", false
	}
	return p.Maps[i], true
}

// Names reports whether the instance has a map of this name.
func (p Parts) Names(name string) bool { return p.Needs(name) || slices.Contains(p.Optional, name) }

// Needs reports whether the instance does not work without a map.
func (p Parts) Needs(name string) bool { return p.Instance == "" || slices.Contains(p.Maps, name) }
