// SPDX-License-Identifier: Apache-2.0

package instances

import (
	"encoding/json"
	"fmt"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// saved is a record as JSON.
type saved[S any] struct {
	Scope string   `json:"scope"`
	Name  string   `json:"name"`
	ID    netns.ID `json:"netns"`
	Spec  S        `json:"spec"`
}

// Save encodes the specs of all readable instances, for a later process.
func (s Store[S]) Save(r *kernel.Root) ([]byte, error) {
	all, _, err := s.All(r)
	if err != nil {
		return nil, err
	}
	out := []saved[S]{}
	for _, rec := range all {
		out = append(out, saved[S]{rec.Scope, rec.Name, rec.ID(), rec.Spec})
	}
	return json.Marshal(out)
}

// Saved decodes the output of Save. Of the meta it restores only the ABI and the network namespace.
func (s Store[S]) Saved(text []byte) (out []Record[S], err error) {
	var all []saved[S]
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("decode the saved instances of %s: %w", s.Feature, err)
	}
	for _, x := range all {
		rec := Record[S]{Instance: s.Name(x.Scope, x.Name), Meta: kernel.Meta{ABI: s.ABI, Inode: x.ID.Inode, Cookie: x.ID.Cookie}, Spec: x.Spec}
		if s.Ref != nil {
			rec.Ref = s.Ref(&rec.Spec)
		}
		out = append(out, rec)
	}
	return out, nil
}
