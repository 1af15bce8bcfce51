"""What every request passes: visits, its life; replies, what is raised; gate, who may come in."""
