// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/service"
)

// configuredMembers returns the configured members of all services with this name, in all namespaces. The error wraps
// [kernel.ErrNotExist] if there is no such service.
func configuredMembers(r *kernel.Root, name string) ([]service.Member, error) {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return nil, err
	}
	var out []service.Member
	var unread instances.Unreadable
	found := false
	for _, i := range all {
		if i.Name != name || !kernel.ValidName(name) {
			continue
		}
		p, err := record.Read(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			unread.Add(i, err)
			continue
		}
		found = true
		out = append(out, p.Service.Members...)
	}
	if !found && len(unread) > 0 {
		return nil, unread.Err()
	} else if !found {
		return nil, fmt.Errorf("service %q: %w", name, kernel.ErrNotExist)
	}
	return out, nil
}
